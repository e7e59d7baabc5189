"""Stacks of equal layers, and the layout of their parameters in which CPUs and GPUs generate.

Training has the parameters of all layers of a stack in one array each, [layers, ...], which `jax.lax.scan` goes through.
Generation has them apart (`for_generation`). Otherwise GPUs would copy each layer's kernels out of the stacked ones for every
chunk, and CPUs once before each loop over chunks.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from jax.typing import DTypeLike

from calm_jax.models.layers import in_compute_dtype
from calm_jax.parallel.devices import GPUS
from calm_jax.parallel.loops import unrolled
from calm_jax.parallel.products import PRODUCT

# The paths of stacks in a tree of parameters.
Stacks = tuple[tuple[str, ...], ...]
# JAX's names of the platforms for which `for_generation` takes layers apart. TPUs copy no kernels out of stacked ones.
_PLATFORMS = ("cpu", *GPUS)
# Linear layers without biases that generation merges into one, as they have the same input. For the name of the module that has them:
# their names, the name of the merged layer, and the axis along which their kernels are concatenated. Only the backbone and the
# autoencoder are looked through: a head from outside of the package may use these names for other layers.
_MERGED = {
    "attention": (("query", "key", "value"), "query_key_value", -2),
    "mlp": (("gate", "up"), "gate_up", -1),
}


def _unroll(length: int, is_loop: bool) -> int:
    return 1 if is_loop else unrolled(length)


def scanned(
    parent: nn.Module,
    layer: Callable[..., nn.Module],
    length: int,
    in_axes: tuple[Any, ...],
    is_loop: bool = False,
) -> Callable[..., nn.Module]:
    """The class of a loop over `length` layers with stacked parameters; the arguments are those of `stack`."""
    is_new = parent.is_initializing()
    return nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=in_axes,
        length=length,
        # Drawing the parameters of each layer in a program of its own would only take longer to compile.
        unroll=_unroll(length, is_new or is_loop),
        # The check traces each layer a second time. It stays where parameters are drawn, as it advances their random numbers:
        # without it a seed would give other first parameters.
        check_constancy_invariants=is_new,
    )


def stack(
    parent: nn.Module,
    layer: Callable[..., nn.Module],
    arguments: Sequence[Any],
    name: str,
    length: int,
    in_axes: tuple[Any, ...],
    is_loop: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`length` equal layers, each applied to the result of the one before it, with parameters of its own.

    Args:
        parent: the module that they belong to.
        layer: a module's class, called `(x, *inputs) -> (x, outputs)`.
        arguments: of the class.
        name: of the stack.
        length: number of layers.
        in_axes: for each of the `inputs`, as for `nn.scan`: 0 for arrays with an axis of layers, `nn.broadcast` for the others.
        is_loop: whether stacked layers are a loop also where they would be `unrolled`.

    Returns:
        The function `(x, *inputs) -> (x, outputs)`; outputs are stacked along a first axis of layers.
    """
    if not parent.has_variable("params", f"{name}_0"):
        return scanned(parent, layer, length, in_axes, is_loop)(*arguments, name=name)

    def one_by_one(x: Any, *inputs: Any) -> tuple[Any, Any]:
        outputs = []
        for index in range(length):
            own = jax.tree.map(functools.partial(_at, index), in_axes, inputs)
            x, output = layer(*arguments, name=f"{name}_{index}")(x, *own)
            outputs.append(output)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    return one_by_one


def recomputed(
    layer: type[nn.Module], length: int, kept: Callable[..., Any], is_loop: bool = False
) -> Callable[..., nn.Module]:
    """The layer of a `stack` of `length`, whose backward pass keeps what the policy `kept` says, and computes the rest again."""
    # In a loop nothing can be joined with what was computed before.
    return nn.remat(layer, prevent_cse=_unroll(length, is_loop) > 1, policy=kept)


def keeping_products(layer: type[nn.Module], length: int) -> Callable[..., nn.Module]:
    """`recomputed`, but for the results of products: norms and activations are computed again.

    On accelerators, storing and reading the norms and activations of N draws at each position would take longer.
    """
    return recomputed(layer, length, jax.checkpoint_policies.save_only_these_names(PRODUCT))


def _at(index: int, axis: Any, tree: Any) -> Any:
    """Layer `index` of a tree of arrays with an axis of layers (`axis` 0); the tree itself if it is the same for all layers."""
    return jax.tree.map(operator.itemgetter(index), tree) if axis == 0 else tree


def for_generation(params: Any, dtype: DTypeLike, stacks: Stacks, mesh: Mesh | None) -> Any:
    """Parameters of a model in the layout for generation. The model computes the same with them, up to rounding.

    Kernels and embedding tables are cast to `dtype`. On CPUs and GPUs, if every device holds all parameters, the layers of stacks are
    taken apart ("layers" becomes "layers_0", "layers_1" and so on), and products of the same input become one. The given arrays stay as
    they are, so that both layouts are in memory until the caller drops the first.

    Args:
        params: float32 parameters, a tree of dictionaries.
        dtype: to compute in.
        stacks: the paths of the stacks (`stack`) in `params`.
        mesh: of the devices that hold them; None for a single device of this process.
    """
    device = jax.local_devices()[0] if mesh is None else mesh.devices.flat[0]
    is_whole = mesh is None or mesh.shape["fsdp"] * mesh.shape["tensor"] == 1
    if device.platform not in _PLATFORMS or not is_whole:
        return in_compute_dtype(params, dtype)
    return _cast_and_apart(params, dtype, stacks)


@functools.partial(jax.jit, static_argnames=("dtype", "stacks"))
def _cast_and_apart(params: Any, dtype: DTypeLike, stacks: Stacks) -> Any:
    # One program, so that no third copy of the parameters is in memory.
    return _apart(in_compute_dtype(params, dtype), stacks)


def _apart(params: Any, stacks: Stacks) -> Any:
    found = {}
    for path, x in flatten_dict(params).items():
        own = next((stack for stack in stacks if path[: len(stack)] == stack), None)
        if own is None:
            found[path] = x
            continue
        for index, layer in enumerate(x):
            found[(*own[:-1], f"{own[-1]}_{index}", *path[len(own) :])] = layer
    for path in list(found):
        for parent, (names, merged, axis) in _MERGED.items():
            if path[0] != "head" and path[-3:] == (parent, names[0], "kernel"):
                parts = [found.pop((*path[:-2], name, "kernel")) for name in names]
                found[(*path[:-2], merged, "kernel")] = jnp.concatenate(parts, axis=axis)
    return unflatten_dict(found)
