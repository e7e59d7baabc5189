"""The output layer of the autoencoder, the baseline and the token predictor: logits over the vocabulary.

P positions, D features, V vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.parallel.constraints import product_in_float32


def logits(x: Array, table_VD: Array) -> Array:
    """The products of features with the table's row of each token.

    Args:
        x: [..., D], in the dtype of the products' operands.
        table_VD: a parameter.

    Returns:
        float32 [..., V].
    """
    table_VD = table_VD.astype(x.dtype)
    dimension_numbers = (((x.ndim - 1,), (1,)), ((), ()))
    if x.dtype == jnp.float32:
        return jax.lax.dot_general(x, table_VD, dimension_numbers)
    return product_in_float32(x, table_VD, dimension_numbers)
