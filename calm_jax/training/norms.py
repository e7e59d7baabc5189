"""Norms of the parameters and of their last update, layer by layer, computed when a line of metrics is written."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from calm_jax.tasks import Params, Stacks
from calm_jax.training.optimizer import OptimizerConfig, decayed, make_schedule

# Norms by module: one for each top-level module, and for a stack of layers a vector with one for each layer.
Norms = dict[str, Array]


def _norms(tree: Params, stacks: Stacks) -> Norms:
    squares: Norms = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = tuple(entry.key for entry in path)
        stack = next((stack for stack in stacks if names[: len(stack)] == stack), None)
        x = leaf.astype(jnp.float32) ** 2
        if stack is None:
            module, square = names[0], x.sum()
        else:
            module, square = "/".join(stack), x.sum(tuple(range(1, x.ndim)))
        squares[module] = squares.get(module, jnp.float32(0)) + square
    return jax.tree.map(jnp.sqrt, squares)


def last_update(config: OptimizerConfig, num_steps: int, params: Params, opt_state: Any) -> Params:
    """The last update of `calm_jax.training.optimizer.make_optimizer`, computed again from the moments in its state.

    Thus the training step does not have to keep the update. Weight decay is computed from the parameters after the update
    instead of before it, an error of `learning_rate * weight_decay` times the update.
    """
    adam = optax.tree.get(opt_state, "ScaleByAdamState")
    count = jnp.maximum(adam.count, 1)
    # As long as all updates were skipped, the last one is zero, weight decay included.
    rate = jnp.where(adam.count > 0, make_schedule(config, num_steps)(count - 1), 0)
    first, second = 1 - config.beta1**count, 1 - config.beta2**count

    def update(mu: Array, nu: Array, param: Array, is_decayed: bool) -> Array:
        direction = mu / first / (jnp.sqrt(nu / second) + config.epsilon)
        return -rate * (direction + config.weight_decay * is_decayed * param)

    return jax.tree.map(update, adam.mu, adam.nu, params, decayed(params))


def make_norms(
    config: OptimizerConfig, num_steps: int, stacks: Stacks
) -> Callable[[Params, Any], dict[str, Norms]]:
    """A function (parameters, optimizer's state) -> norms of both kinds, "parameter_norm" and "update_norm".

    Args:
      config, num_steps: those of the optimizer.
      stacks: the paths of the stacks of layers in the parameters.
    """

    def norms(params: Params, opt_state: Any) -> dict[str, Norms]:
        update = last_update(config, num_steps, params, opt_state)
        return {"parameter_norm": _norms(params, stacks), "update_norm": _norms(update, stacks)}

    return norms


def by_layer(norms: dict[str, Norms]) -> dict[str, float]:
    """The norms by the name of their metric: KIND/MODULE, or KIND/STACK/INDEX for each layer of a stack."""
    values: dict[str, float] = {}
    for kind, of_kind in jax.device_get(norms).items():
        for module, norm in of_kind.items():
            if norm.ndim:
                values |= {f"{kind}/{module}/{index}": float(x) for index, x in enumerate(norm)}
            else:
                values[f"{kind}/{module}"] = float(norm)
    return values
