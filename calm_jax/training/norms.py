"""Norms of the parameters and of their last update, layer by layer, computed when a line of metrics is written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from calm_jax.tasks import Params
from calm_jax.training.optimizer import OptimizerConfig, decayed, make_schedule


def _layers(path: tuple[Any, ...], leaf: Array) -> list[str]:
    """The layers that a parameter belongs to: its top-level module, or for stacked layers one for each index of axis 0."""
    names = [entry.key for entry in path]
    for depth, name in enumerate(names[:-1], 1):
        if name.endswith(("layers", "blocks")):
            return [f"{'/'.join(names[:depth])}/{index}" for index in range(leaf.shape[0])]
    return [names[0]]


def _norms(tree: Params) -> dict[str, Array]:
    """The norm of each layer's parameters."""
    squares: dict[str, Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        layers = _layers(path, leaf)
        for layer, x in zip(layers, leaf.reshape(len(layers), -1), strict=True):
            squares[layer] = squares.get(layer, jnp.float32(0)) + (x.astype(jnp.float32) ** 2).sum()
    return {layer: jnp.sqrt(square) for layer, square in squares.items()}


def last_update(config: OptimizerConfig, num_steps: int, params: Params, opt_state: Any) -> Params:
    """The last update of `calm_jax.training.optimizer.make_optimizer`, computed again from the moments in its state.

    Thus the training step does not have to keep the update. Weight decay is computed from the parameters after the update
    instead of before it, an error of `learning_rate * weight_decay` times the update.
    """
    adam = optax.tree.get(opt_state, "ScaleByAdamState")
    count = jnp.maximum(adam.count, 1)
    rate = make_schedule(config, num_steps)(count - 1)
    first, second = 1 - config.beta1**count, 1 - config.beta2**count

    def update(mu: Array, nu: Array, param: Array, is_decayed: bool) -> Array:
        direction = mu / first / (jnp.sqrt(nu / second) + config.epsilon)
        return -rate * (direction + config.weight_decay * is_decayed * param)

    return jax.tree.map(update, adam.mu, adam.nu, params, decayed(params))


def make_norms(
    config: OptimizerConfig, num_steps: int
) -> Callable[[Params, Any], dict[str, Array]]:
    """A function (parameters, optimizer's state) -> norms by name: `parameter_norm/LAYER` and `update_norm/LAYER`."""

    def norms(params: Params, opt_state: Any) -> dict[str, Array]:
        trees = {"parameter_norm": params}
        trees["update_norm"] = last_update(config, num_steps, params, opt_state)
        return {
            f"{name}/{layer}": norm
            for name, tree in trees.items()
            for layer, norm in _norms(tree).items()
        }

    return norms
