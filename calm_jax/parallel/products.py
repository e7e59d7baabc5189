"""Matrix products of activations and parameters, each in the form that its device computes fast, with the smaller of both
moving between devices."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from calm_jax.parallel.constraints import batch_shards, each_group, gathered_kernel, rows_per_device
from calm_jax.parallel.devices import GPUS, target_device

# The checkpoint name of the products' results, for the policies of `lm.model.remat`.
PRODUCT = "product"
# Products of up to so many rows take most of their time to read the kernels.
_FEW_ROWS = 256


def product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    in_float32: bool = False,
) -> jax.Array:
    """`lax.dot_general` of activations and a parameter, where the smaller of the two moves between devices.

    If the parameter is at most as large as the activations, it is gathered. In a scan over layers it is gathered again in the
    backward pass, so that no more than one layer's is whole at a time; outside of scans XLA merges both gathers into one, and
    keeps the whole parameter in between. Otherwise, and if the rows do not divide over the mesh, the compiler decides what moves.

    Args:
      x: activations, sharded over their first axis.
      kernel: a parameter, in the dtype to compute in.
      dimension_numbers: as of `lax.dot_general`, without batch dimensions.
      precision: as of `lax.dot_general`.
      in_float32: whether the result is float32 for bfloat16 operands, too (see `product_in_float32`).

    Returns:
      As of `lax.dot_general`, with the checkpoint name `PRODUCT`.
    """

    def dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
        of_x, of_kernel = map(tuple, dimension_numbers[0])
        size = len(of_x)
        kept = x.shape[: x.ndim - size]
        is_plain = of_x == tuple(range(len(kept), x.ndim)) and of_kernel == tuple(range(size))
        if is_plain and precision is None and has_all_rows_on_one_cpu():
            return _flat_product(x, kernel, size, jnp.float32 if in_float32 else x.dtype)
        if in_float32 and x.dtype != jnp.float32:
            return product_in_float32(x, kernel, dimension_numbers)
        if is_plain and is_single_row(kept, *GPUS):
            return _single_row_product(x, kernel, size, precision)
        return jax.lax.dot_general(x, kernel, dimension_numbers, precision)

    if batch_shards() == 1 or len(x) % batch_shards() or x.size < kernel.size:
        return checkpoint_name(dot(x, kernel), PRODUCT)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def with_whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
        kernel = gathered_kernel(kernel)
        kernels = each_group(kernel, x)
        if kernels is None:
            return dot(x, kernel)
        groups = len(kernels)
        parts = jax.vmap(dot)(x.reshape(groups, len(x) // groups, *x.shape[1:]), kernels)
        return parts.reshape(len(x), *parts.shape[2:])

    return checkpoint_name(with_whole(x, kernel), PRODUCT)


def matrix_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, activations [..., I] and a matrix [I, O], in a way that CPUs and GPUs compute fast for few rows.

    In float32 the variant for CPUs is not used for many rows, because it makes a training step 15 % slower. The result has the
    checkpoint name `PRODUCT`.
    """
    if has_all_rows_on_one_cpu() and (
        _has_few_rows(x) or (x.dtype == jnp.bfloat16 and is_one_cpu_device())
    ):
        result = _flat_product(x, kernel, 1, x.dtype)
    elif is_single_row(x.shape[:-1], *GPUS):
        result = _single_row_product(x, kernel, 1, None)
    else:
        result = x @ kernel
    return checkpoint_name(result, PRODUCT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_in_float32(
    x: jax.Array, y: jax.Array, dimension_numbers: jax.lax.DotDimensionNumbers
) -> jax.Array:
    """`lax.dot_general` of bfloat16 operands with a float32 result, whose gradients are bfloat16 products again.

    Automatic differentiation would multiply the float32 cotangent by the operands in float32, for which the bfloat16 matrix units
    of accelerators and CPUs (AMX) cannot be used. All three products are summed in float32.
    """
    return jax.lax.dot_general(x, y, dimension_numbers, preferred_element_type=jnp.float32)


def _product_in_float32_backward(
    dimension_numbers: jax.lax.DotDimensionNumbers, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = kept
    g = g.astype(x.dtype)
    of_x, of_y = map(tuple, dimension_numbers[0])
    if is_one_cpu_device() and of_x == (x.ndim - 1,) and y.ndim == 2:
        to_x = (((g.ndim - 1,), (1 - of_y[0],)), ((), ()))
        x_gradient = jax.lax.dot_general(g, y, to_x, preferred_element_type=jnp.float32)
        rows = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        y_gradient = transposed_product(*(rows if of_y == (0,) else rows[::-1]), y.dtype)
        return x_gradient.astype(x.dtype), y_gradient
    _, pull = jax.vjp(lambda x, y: jax.lax.dot_general(x, y, dimension_numbers), x, y)
    return pull(g)


product_in_float32.defvjp(
    lambda x, y, dimension_numbers: (product_in_float32(x, y, dimension_numbers), (x, y)),
    _product_in_float32_backward,
)


def transposed_product(x: jax.Array, y: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x^T y`, [..., P, I] and [..., P, O] -> [..., I, O] in `dtype`: a sum over the rows of activations and gradients.

    XLA's CPU backend computes bfloat16 products by AMX only if they contract the last axis of an array that is stored row by row and
    have a float32 result; one that contracts the first axes of both sides takes four times as long. So on a CPU the smaller side is
    copied. The layouts of the copy and of the result are given, because XLA would otherwise make one product of a transpose and a
    product, and for some of those it has no program.
    """
    batch, rows = tuple(range(x.ndim - 2)), x.ndim - 2
    if x.dtype != jnp.bfloat16 or not is_one_cpu_device():
        contracted = (((rows,), (rows,)), (batch, batch))
        return jax.lax.dot_general(x, y, contracted, preferred_element_type=dtype)
    if x.shape[-1] > y.shape[-1]:
        return transposed_product(y, x, dtype).swapaxes(-1, -2)
    x_by_features = _stored_by_rows(x.swapaxes(-1, -2))
    contracted = (((rows + 1,), (rows,)), (batch, batch))
    result = jax.lax.dot_general(x_by_features, y, contracted, preferred_element_type=jnp.float32)
    return _stored_by_rows(result).astype(dtype)


def _stored_by_rows(x: jax.Array) -> jax.Array:
    """The same array, with its last axis contiguous in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _has_few_rows(x: jax.Array) -> bool:
    """Whether the products of activations [..., features] have so few rows that reading the kernels takes most of their time."""
    return math.prod(x.shape[:-1]) <= _FEW_ROWS


def has_all_rows_on_one_cpu() -> bool:
    """Whether all rows of a batch are on one CPU device; its weights may be split over `tensor`."""
    return batch_shards() == 1 and target_device().platform == "cpu"


def is_one_cpu_device() -> bool:
    """Whether a program runs on one CPU device, so that its arrays can be given layouts: XLA's partitioner gathers such arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return target_device().platform == "cpu" and (mesh.empty or mesh.size == 1)


def is_single_row(kept: tuple[int, ...], *platforms: str) -> bool:
    """Whether a product has a single row per device, and the devices are of one of `platforms`; `kept` holds the sizes of the
    activations' axes that are not contracted."""
    return rows_per_device(math.prod(kept)) == 1 and target_device().platform in platforms


def _single_row_product(
    x: jax.Array, kernel: jax.Array, num_contracted: int, precision: jax.lax.PrecisionLike
) -> jax.Array:
    """The product over the last axes of a single row and the first of `kernel`; for GPUs.

    XLA for GPUs computes the product of a single row as elementwise products and a sum, which is slower than the product of two
    rows. So the row gets a second one of zeros.
    """
    axis = x.ndim - num_contracted
    padding = [(0, 1) if one == axis else (0, 0) for one in range(x.ndim + 1)]
    rows = jax.numpy.pad(jax.numpy.expand_dims(x, axis), padding)
    contracted = (tuple(range(axis + 1, rows.ndim)), tuple(range(num_contracted)))
    result = jax.lax.dot_general(rows, kernel, (contracted, ((), ())), precision)
    return result[(slice(None),) * axis + (0,)]


def _flat_product(
    x: jax.Array, kernel: jax.Array, num_contracted: int, dtype: DTypeLike
) -> jax.Array:
    """The product over the last axes of `x` and the first of `kernel`, as one product of two matrices; for CPUs."""
    kept, features = x.shape[: x.ndim - num_contracted], kernel.shape[num_contracted:]
    size = math.prod(kernel.shape[:num_contracted])
    x = x.reshape(-1, size)
    kernel = kernel.reshape(size, -1)
    if len(x) == 1 and size % 2 == 0:
        # The CPU backend of jaxlib 0.10 computes the product of a single row by scalar loops. With a second row of zeros it would read
        # the kernel at half of the memory's bandwidth. So the features are halved: two products run at once on two cores, each at
        # that rate. Odd numbers of features, which no recipe has, stay slow.
        halves, kernels = x.reshape(2, 1, -1), kernel.reshape(2, size // 2, -1)
        result = jnp.sum(jnp.matmul(halves, kernels, preferred_element_type=jnp.float32), axis=0)
    elif x.dtype == dtype and (dtype == jnp.float32 or not is_one_cpu_device()):
        result = _matrix_product(x, kernel)
    else:
        # XLA's CPU backend has products by AMX for float32 results only.
        result = product_in_float32(x, kernel, (((1,), (0,)), ((), ())))
    return result.astype(dtype).reshape(*kept, *features)


@jax.custom_vjp
def _matrix_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel`, whose gradients are products that XLA's CPU backend computes fast.

    A product that contracts the first axes of both sides is slow there, so the kernel's gradient is computed
    transposed, and then transposed.
    """
    return x @ kernel


_matrix_product.defvjp(
    lambda x, kernel: (x @ kernel, (x, kernel)),
    lambda kept, g: (g @ kept[1].T, (g.T @ kept[0]).T),
)
