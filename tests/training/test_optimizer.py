"""The learning-rate schedule, and AdamW with clipping against the textbook's equations."""

import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.training import optimizer


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
