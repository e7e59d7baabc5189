"""Tiny latent heads for tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax.models.heads import LATENT_HEADS
from calm_jax.models.heads.diffusion import DiffusionHeadConfig
from calm_jax.models.heads.energy import EnergyHeadConfig
from calm_jax.models.heads.flow import FlowHeadConfig
from tests.models.networks import EPSILON, keys, random_like

D = 32
CONFIGS = {
    "energy": EnergyHeadConfig(
        "energy",
        num_blocks=2,
        noise_size=8,
        num_samples=8,
        num_target_samples=8,
        beta=1.0,
    ),
    # Sampling visits all 1000 steps of training. At the first, noisiest step almost no signal is left, and the
    # network's error is multiplied by sqrt(alpha_bar_before / alpha_bar): 32 for 1000 steps, but 318 for 100, too much
    # for a network that trained for seconds.
    "diffusion": DiffusionHeadConfig("diffusion", num_blocks=2, num_samples=8, num_steps=1000),
    "flow": FlowHeadConfig("flow", num_blocks=2, num_samples=8, num_steps=10, solver="midpoint"),
}


def build_head(name, latent_size, **changes):
    config = dataclasses.replace(CONFIGS[name], **changes)
    return LATENT_HEADS[name][0](config, D, latent_size, EPSILON, jnp.float32)


def initial(head, seed=0):
    """The head's initial variables."""
    init = jax.jit(lambda key: head.init(key, jnp.zeros((1, D)), 1, keys(1), 1, method="sample"))
    return init(jax.random.key(seed))


def random_variables(head, seed=0):
    """The head's variables, none of them at an initial zero or one."""
    return random_like(jax.eval_shape(lambda: initial(head)), seed, std=0.2)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 3))
def draws_of(head, variables, h_PD, num_draws, key_P, noise_scale=1.0):
    return head.apply(variables, h_PD, num_draws, key_P, noise_scale, method="sample")
