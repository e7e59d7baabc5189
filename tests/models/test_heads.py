"""Properties that hold for every latent head, initial values, and configs that are refused."""

import dataclasses
import math

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.losses import Posterior
from calm_jax.models.heads import HEADS, LATENT_HEADS, flow
from calm_jax.models.heads.adaln import AdaLNMLP
from calm_jax.models.heads.diffusion import loss_terms
from tests.models.networks import EPSILON, keys
from tests.models.tiny_heads import (
    CONFIGS,
    D,
    build_head,
    draws_of,
    initial,
    normal,
    random_variables,
)


def test_every_latent_head_has_a_config_in_these_tests():
    assert set(CONFIGS) == set(LATENT_HEADS)
    assert set(HEADS) - set(LATENT_HEADS) == {"softmax"}


# --- Properties of every head


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT_HEADS)
def test_random_numbers_of_a_position_come_from_its_own_key(name):
    """Loss and draws of some positions, in another order, equal those of the same positions among all."""
    head = build_head(name, 4, **({} if name == "energy" else {"num_steps": 5}))
    variables, h_PD = random_variables(head), normal(5, D)
    posterior = Posterior(normal(5, 4, seed=1), normal(5, 4, seed=2) / 3)
    loss = jax.jit(lambda h, p, k: head.apply(variables, h, p, k, method="loss"))
    losses, drawn = loss(h_PD, posterior, keys(5)), draws_of(head, variables, h_PD, 3, keys(5))
    assert losses.shape == (5,)
    assert drawn.shape == (5, 3, 4)
    assert losses.dtype == drawn.dtype == jnp.float32
    some = np.array([3, 0])
    some_losses = loss(h_PD[some], Posterior(*(x[some] for x in posterior)), keys(5)[some])
    np.testing.assert_allclose(some_losses, losses[some], rtol=1e-4)
    some_drawn = draws_of(head, variables, h_PD[some], 3, keys(5)[some])
    np.testing.assert_allclose(some_drawn, drawn[some], rtol=1e-3, atol=1e-3)
    # Other keys give other losses, the same keys the same.
    assert (np.abs(loss(h_PD, posterior, keys(5, seed=8)) - losses) > 1e-5).all()
    np.testing.assert_array_equal(loss(h_PD, posterior, keys(5)), losses)


def test_without_target_samples_the_energy_heads_target_is_the_posteriors_mean():
    """As for a posterior without noise, from which many are drawn."""
    mean = normal(5, 4, seed=1)
    head = build_head("energy", 4)
    variables, h_PD = random_variables(head), normal(5, D)

    def loss(num_target_samples, log_std):
        head = build_head("energy", 4, num_target_samples=num_target_samples)
        posterior = Posterior(mean, log_std)
        return head.apply(variables, h_PD, posterior, keys(5), method="loss")

    log_std = normal(5, 4, seed=2) / 3
    np.testing.assert_allclose(loss(0, log_std), loss(7, jnp.full_like(mean, -50)), rtol=1e-5)
    assert (np.abs(loss(0, log_std) - loss(7, log_std)) > 1e-2).all()


@pytest.mark.parametrize("name", LATENT_HEADS)
def test_draws_differ_from_each_other_and_depend_on_the_hidden_state(name):
    head = build_head(name, 4, **({} if name == "energy" else {"num_steps": 5}))
    variables, same_key = random_variables(head), jnp.stack([jax.random.key(1)] * 2)
    drawn = np.asarray(draws_of(head, variables, normal(2, D), 6, same_key))
    between = np.linalg.norm(drawn[:, :, None] - drawn[:, None], axis=-1)
    assert (between + np.eye(6) > 1e-4).all()
    # The two positions have the same key and so the same noise: only their hidden states differ.
    assert (np.abs(drawn[0] - drawn[1]).max(-1) > 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize("solver", flow.SOLVERS)
def test_an_untrained_flow_head_returns_its_initial_noise(solver):
    """Its velocity is 0 everywhere, so that its draws are standard normal."""
    head = build_head("flow", 4, solver=solver)
    variables = initial(head)
    noise_PNZ = normal(3, 5, 4)
    carried = head.apply(variables, normal(3, D), noise_PNZ, method="integrate")
    np.testing.assert_array_equal(carried, noise_PNZ)
    drawn = np.asarray(draws_of(head, variables, normal(3, D), 1000, keys(3)))
    # 12,000 numbers; 5 standard errors, one false alarm in a million.
    assert abs(drawn.mean()) < 5 / math.sqrt(drawn.size)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / drawn.size)


@pytest.mark.slow
def test_an_untrained_diffusion_head_predicts_zero_noise_and_zero_v():
    """The error of the noise is then the mean square of the noise."""
    head = build_head("diffusion", 4)
    variables, time_PN = initial(head), np.array([[0, 500, 999]] * 2)
    output = head.apply(variables, normal(2, 3, 4), time_PN, normal(2, D), method="predict")
    np.testing.assert_array_equal(output, np.zeros((2, 3, 8)))
    noise = normal(2, 3, 4, seed=1)
    error, _ = loss_terms(output, normal(2, 3, 4), noise, time_PN)
    np.testing.assert_allclose(error, (noise**2).mean(-1), rtol=1e-6)


def test_an_untrained_energy_head_draws_zeros():
    head = build_head("energy", 4)
    drawn = draws_of(head, initial(head), normal(3, D), 5, keys(3))
    np.testing.assert_array_equal(drawn, np.zeros((3, 5, 4)))


@pytest.mark.parametrize("name", ["diffusion", "flow"])
def test_initial_parameters_of_the_adaln_network(name):
    """Kernels: Xavier-uniform; N(0, 0.02) in the time embedding; zero in the modulations and the last layer. Biases: zero."""
    variables = initial(build_head(name, 4))
    flat = flax.traverse_util.flatten_dict(variables["params"]["net"], sep="/")
    zero, small = {"blocks/modulation", "modulation", "output"}, {"time_hidden", "time"}
    xavier = {"condition", "input", "blocks/up", "blocks/down"}
    assert {path.rsplit("/", 1)[0] for path in flat} == zero | small | xavier | {"blocks/norm"}
    for path, value in flat.items():
        layer, kind = path.rsplit("/", 1)
        value = np.asarray(value)
        if kind == "bias" or layer in zero:
            assert (value == 0).all(), path
        elif kind == "scale":
            assert (value == 1).all(), path
        elif layer in small:
            # 1024 or 8192 numbers: 5 standard errors of their standard deviation are 11 % or 4 %.
            assert abs(value.std() / 0.02 - 1) < 0.11, path
            assert np.abs(value).max() > 2.5 * 0.02, path  # not uniform
        else:
            bound = math.sqrt(6 / sum(value.shape[-2:]))
            assert np.abs(value).max() <= bound, path
            # 128 uniform numbers or more: the largest is below 0.9 of the bound once in 10^5 times.
            assert np.abs(value).max() > 0.9 * bound, path
            assert abs(value.std() / (bound / math.sqrt(3)) - 1) < 0.2, path
    up = flat["blocks/up/kernel"]
    assert up.shape == (2, D, D)
    assert np.abs(up[0] - up[1]).max() > 0.1  # each block has its own parameters


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4)])
def test_a_shared_time_equals_the_same_time_at_every_draw(shape):
    net = AdaLNMLP(
        num_blocks=2, hidden_size=D, output_size=3, norm_epsilon=EPSILON, dtype="float32"
    )
    x_PNZ, h_PD = normal(3, 4, 2), normal(3, D)
    time = np.array([7, 999, 420, 0])[: max(shape)].reshape(shape)
    shapes = jax.eval_shape(net.init, jax.random.key(0), x_PNZ, time, h_PD)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: rng.normal(0.2, 0.2, x.shape).astype(np.float32), shapes)
    shared = net.apply(variables, x_PNZ, time, h_PD)
    apart = net.apply(variables, x_PNZ, np.broadcast_to(time, (3, 4)), h_PD)
    np.testing.assert_allclose(shared, apart, rtol=1e-5, atol=1e-5)
    other = net.apply(variables, x_PNZ, (time + 1) % 1000, h_PD)
    assert np.abs(other - shared).max() > 1e-3  # time matters


# --- Bad configs

BAD = [
    ("diffusion", "num_steps", 1),
    ("diffusion", "num_steps", 0),
    ("diffusion", "num_steps", 1001),
    ("diffusion", "num_samples", 0),
    ("diffusion", "num_blocks", 0),
    ("flow", "num_steps", 0),
    ("flow", "num_steps", 1001),
    ("flow", "solver", "rk4"),
    ("flow", "num_samples", 0),
    ("flow", "num_blocks", 0),
    ("energy", "num_samples", 1),
    ("energy", "num_target_samples", -1),
    ("energy", "noise_size", 0),
    ("energy", "num_blocks", 0),
    ("energy", "beta", 0.0),
    ("energy", "beta", 2.1),
]


@pytest.mark.parametrize("name,key,value", BAD)
def test_a_bad_value_is_refused_with_its_config_key(name, key, value):
    with pytest.raises(UserError, match=rf"^lm\.head\.{key}={value!r} "):
        dataclasses.replace(CONFIGS[name], **{key: value})


@pytest.mark.parametrize(
    "name,num_steps", [("diffusion", 2), ("diffusion", 1000), ("flow", 1), ("flow", 1000)]
)
def test_the_smallest_and_the_largest_num_steps_are_accepted(name, num_steps):
    assert dataclasses.replace(CONFIGS[name], num_steps=num_steps).num_steps == num_steps
