"""The learning-rate schedule, and AdamW with clipping against the textbook's equations."""

import dataclasses
import math
import types

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calm_jax.errors import UserError
from calm_jax.training import optimizer
from calm_jax.training.norms import by_layer, make_norms


def tiny_tree():
    return {
        "up": {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([0.5, 0.0])},
        "norm": {"scale": jnp.array([2.0])},
    }


def optimizer_config(**changes):
    values = {
        "learning_rate": 0.1,
        "warmup_steps": 0,
        "schedule": "constant",
        "final_learning_rate": 0.0,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    }
    return optimizer.OptimizerConfig(**(values | changes))


def schedule_at(steps, **changes):
    schedule = optimizer.make_schedule(optimizer_config(**changes), num_steps=24)
    return [float(schedule(step)) for step in steps]


def test_constant_schedule_warms_up_from_zero_and_stays_at_the_peak():
    values = schedule_at([0, 1, 2, 4, 5, 1000], warmup_steps=4)
    np.testing.assert_allclose(values, [0, 0.025, 0.05, 0.1, 0.1, 0.1], rtol=1e-6)


def test_cosine_schedule_ends_at_the_final_rate():
    values = schedule_at(
        [0, 2, 4, 9, 14, 24, 1000], warmup_steps=4, schedule="cosine", final_learning_rate=0.02
    )
    quarter = 0.02 + 0.08 * (1 + math.sqrt(0.5)) / 2
    np.testing.assert_allclose(values, [0, 0.05, 0.1, quarter, 0.06, 0.02, 0.02], rtol=1e-6)


@pytest.mark.parametrize("schedule", optimizer.SCHEDULES)
def test_without_warm_up_the_first_step_has_the_peak_rate(schedule):
    np.testing.assert_allclose(schedule_at([0], schedule=schedule), [0.1], rtol=1e-6)


def test_optimizer_steps_equal_adamw_by_hand():
    """Two updates, the first with a clipped gradient, against the textbook's equations in float64."""
    config = optimizer_config(learning_rate=0.1, epsilon=1e-3)
    params = tiny_tree()
    by_hand = {
        path: np.asarray(leaf, np.float64)
        for path, leaf in flax.traverse_util.flatten_dict(params).items()
    }
    first = {path: np.zeros_like(value) for path, value in by_hand.items()}
    second = {path: np.zeros_like(value) for path, value in by_hand.items()}
    transform = optimizer.make_optimizer(config, num_steps=10)
    state = transform.init(params)
    for step, scale in enumerate((5.0, 0.05), 1):
        gradient = jax.tree.map(lambda leaf, scale=scale: scale * (leaf + 1), params)
        updates, state = transform.update(gradient, state, params)

        flat = flax.traverse_util.flatten_dict(gradient)
        norm = math.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in flat.values()))
        assert (norm > config.max_grad_norm) == (step == 1)
        for path, g in flat.items():
            g = np.asarray(g, np.float64) / max(1, norm / config.max_grad_norm)
            first[path] = config.beta1 * first[path] + (1 - config.beta1) * g
            second[path] = config.beta2 * second[path] + (1 - config.beta2) * g**2
            m, v = first[path] / (1 - config.beta1**step), second[path] / (1 - config.beta2**step)
            decay = config.weight_decay * by_hand[path] * (path[-1] == "kernel")
            update = m / (np.sqrt(v) + config.epsilon) + decay
            by_hand[path] = by_hand[path] - config.learning_rate * update

        params = jax.tree.map(jnp.add, params, updates)
        for path, leaf in flax.traverse_util.flatten_dict(params).items():
            np.testing.assert_allclose(leaf, by_hand[path], rtol=2e-6, atol=1e-7)


# Keys of the optimizer at their limits, and a gradient for each of the first steps.
EXTREMES = {
    # The largest direction: the second moment forgets a gradient that the first one keeps.
    "direction": (
        {"beta1": 0.999999, "beta2": 0.0, "epsilon": 1e-20, "max_grad_norm": 1e10},
        (1e15, 0.0),
    ),
    "small gradients": ({"epsilon": 1e-20, "beta2": 0.999999}, (0.0, 1e-30, 1e-38)),
    "decay": ({"weight_decay": 1e3, "learning_rate": 1e-3}, (1.0,)),
    "schedule": (
        {
            "learning_rate": 1e-20,
            "final_learning_rate": 1.0,
            "weight_decay": 1.0,
            "schedule": "cosine",
        },
        (1.0,),
    ),
}
# The same beyond a limit.
BEYOND = {
    "direction": {"epsilon": 1e-30},
    "small gradients": {"epsilon": 0.0},
    "decay": {"weight_decay": 1e38, "learning_rate": 1e-38},
    "schedule": {"learning_rate": 1e-40},
}


def are_finite_after(config, gradients) -> bool:
    """Whether parameters of up to 100 and the state are finite after 200 updates; the last gradient is repeated."""
    transform, params = (
        optimizer.make_optimizer(config, num_steps=200),
        {"kernel": jnp.array([100.0, -3.0])},
    )
    update, state = jax.jit(transform.update), transform.init(params)
    for step in range(200):
        size = gradients[min(step, len(gradients) - 1)]
        updates, state = update({"kernel": jnp.full(2, size)}, state, params)
        params = optax.apply_updates(params, updates)
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


@pytest.mark.parametrize("name", EXTREMES)
def test_parameters_stay_finite_within_the_limits_of_the_config_and_not_beyond(name):
    changes, gradients = EXTREMES[name]
    config = optimizer_config(**{"learning_rate": 1.0} | changes)
    assert are_finite_after(config, gradients)
    with pytest.raises(UserError, match="must be from"):
        dataclasses.replace(config, **BEYOND[name])
    beyond = types.SimpleNamespace(**dataclasses.asdict(config) | BEYOND[name])
    assert not are_finite_after(beyond, gradients)


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_logged_norms_are_those_of_the_parameters_and_of_the_last_change(warmup_steps):
    """With decay, clipping and a schedule; stacked layers one by one.

    To 2e-3: the decay is taken after the update, and the change is a difference of rounded numbers.
    """
    rng = np.random.default_rng(0)

    def tree(scale: float) -> dict:
        def draw(*shape):
            return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

        layers = {"up": {"kernel": draw(3, 4, 5), "bias": draw(3, 5)}}
        backbone = {"layers": layers, "norm": {"scale": draw(4)}}
        return {"backbone": backbone, "embed": {"embedding": draw(7, 4)}}

    config = optimizer_config(schedule="cosine", warmup_steps=warmup_steps, learning_rate=0.01)
    make, params = optimizer.make_optimizer(config, 24), tree(1.0)
    state, norms_of = make.init(params), jax.jit(make_norms(config, 24, (("backbone", "layers"),)))
    for _ in range(5):
        updates, state = make.update(tree(0.3), state, params)
        before, params = params, optax.apply_updates(params, updates)
        norms = by_layer(norms_of(params, state))
        change = jax.tree.map(jnp.subtract, params, before)
        for name, values in (("parameter_norm", params), ("update_norm", change)):
            backbone = values["backbone"]
            for layer in range(3):
                of_layer = jax.tree.map(lambda x, layer=layer: x[layer], backbone["layers"])
                expected = optax.tree.norm(of_layer)
                np.testing.assert_allclose(
                    norms.pop(f"{name}/backbone/layers/{layer}"), expected, rtol=2e-3
                )
            for layer, own in (("backbone", backbone["norm"]), ("embed", values["embed"])):
                np.testing.assert_allclose(
                    norms.pop(f"{name}/{layer}"), optax.tree.norm(own), rtol=2e-3
                )
        assert not norms


def test_an_update_that_was_not_made_has_no_norm():
    """After skipped updates alone, also where weights decay."""
    config, params = optimizer_config(), tiny_tree()
    state = optimizer.make_optimizer(config, 24).init(params)
    norms = by_layer(make_norms(config, 24, ())(params, state))
    assert norms["update_norm/up"] == 0 and norms["parameter_norm/up"] > 2
