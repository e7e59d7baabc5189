"""Tiny networks for tests: sizes, random parameters, and the shapes that a program computes."""

import math
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.transformer import TransformerConfig

EPSILON = 1e-6


def transformer_config(**changes) -> TransformerConfig:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "rope_theta": 1e4,
        "rms_norm_epsilon": EPSILON,
        "norm_epsilon": EPSILON,
        "remat": "none",
        "attention": "auto",
    }
    return TransformerConfig(**(sizes | changes))


def autoencoder_config(**changes) -> AutoencoderConfig:
    sizes = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "norm_epsilon": EPSILON,
        "dropout": 0.15,
        "kl_clamp": 0.5,
        "kl_weight": 1e-3,
    }
    return AutoencoderConfig(**(sizes | changes))


def random_like(shapes: Any, seed: int = 0, std: float = 0.3, head_std: float = 0.3) -> dict:
    """Random parameters in the given shapes, none at an initial zero or one: scales around 1, all others around 0.

    head_std: of the parameters of a language model's head.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        spread = head_std if path.startswith("head/") else std
        # Cast by numpy: JAX would compile a program for each shape.
        return jnp.asarray(np.float32(rng.normal(path.endswith("scale"), spread, shape)))

    flat = flax.traverse_util.flatten_dict(shapes, sep="/")
    drawn = {path: draw(path, leaf.shape) for path, leaf in flat.items()}
    return flax.traverse_util.unflatten_dict(drawn, sep="/")


def random_params(task: Any, seed: int = 0) -> dict:
    """`random_like` the parameters of a task."""
    return random_like(jax.eval_shape(task.init, jax.random.key(0)), seed)


def count(task: Any) -> int:
    """The number of parameters of a task."""
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def keys(num: int, seed: int = 7) -> jax.Array:
    return jax.random.split(jax.random.key(seed), num)


def assert_close(ours, expected, tolerance=1e-5):
    """Equal to `tolerance` of the largest value."""
    ours, expected = np.asarray(ours, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def shapes_in(jaxpr):
    """The shape of every value that a jaxpr computes, inner jaxprs included."""
    for equation in jaxpr.eqns:
        for value in equation.outvars:
            yield value.aval.shape
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            if hasattr(inner, "eqns"):
                yield from shapes_in(inner)
