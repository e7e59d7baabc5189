"""Counting equal draws in a pool without decoding all of their tokens.

B rows, N draws of each (a pool), K tokens per chunk, R any flattened axes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.sampling.chunk_model import ChunkModel

# Tokens at one position are decoded in blocks of 1/_PARTS of all draws, at least _LEAST_TOGETHER: smaller blocks waste
# less of the last block, larger ones keep the device busy.
_LEAST_TOGETHER, _PARTS = 32, 8


class Counted(NamedTuple):
    """Counts of equal draws, and their cost.

    Attributes:
        count: int32 [B, N], the count of each draw's chunk in its pool.
        is_first: bool [B, N], whether no draw before it is equal.
        decoded: int32 [B], how many tokens of the row's draws were decoded.
    """

    count: Array  # type: ignore[assignment]  # hides `tuple.count`, which nothing here calls
    is_first: Array
    decoded: Array


def is_first_of(equal_BNN: Array) -> Array:
    """Which draws are the first among equal ones: no draw before them is equal, bool [B, N]."""
    return equal_BNN.argmax(-1) == jnp.arange(equal_BNN.shape[-1])


def count_draws(model: ChunkModel, h_BD: Array, latent_BNZ: Array, min_count: int) -> Counted:
    """Counts equal chunks among each row's draws without decoding all of their tokens (ours).

    The last position of a chunk is decoded for all draws. Each position before it, from the last but one to the first,
    is then decoded only for the draws whose tokens so far are shared by at least `min_count` draws (themselves included):
    the others cannot reach that count.

    Args:
        model: the model's `ChunkModel` interface.
        h_BD: the hidden states that the draws were made from.
        latent_BNZ: the draws.
        min_count: counts of at least this many are exact.

    Returns:
        Counts, exact where at least `min_count`; a smaller one may be any number from 1 to min_count - 1. So min_count = 2
        makes all counts exact.
    """
    batch, num_draws, _ = latent_BNZ.shape
    with jax.named_scope("count"):
        x_BNKD, prior_B1KE = model.unfold_draws(latent_BNZ), model.prior_of(h_BD)
        last = x_BNKD.shape[2] - 1
        # Draws that are no longer decoded get token ids that are negative and all different, so that none are equal.
        nobody_BN = -1 - jnp.arange(num_draws) + jnp.zeros((batch, 1), jnp.int32)

        def at(place: Array | int) -> tuple[Array, Array | None]:
            """The draws' features at a position of their chunks [B, N, D], and the features of its prior [B, 1, E]."""
            return jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, place, axis=2, keepdims=False),
                (x_BNKD, prior_B1KE),
            )

        def narrow(state: tuple[Array, Array, Array], token_BN: Array):
            kept_BN, equal_BNN, decoded_B = state
            token_BN = jnp.where(kept_BN, token_BN, nobody_BN)
            equal_BNN &= token_BN[:, :, None] == token_BN[:, None]
            decoded_B += kept_BN.sum(-1)
            return kept_BN & (equal_BNN.sum(-1) >= min_count), equal_BNN, decoded_B

        def next_position(index: Array, state: tuple[Array, Array, Array]):
            return narrow(state, _argmax_of_kept(model, *at(last - index), state[0]))

        state = (
            jnp.ones((batch, num_draws), bool),
            jnp.ones((batch, num_draws, num_draws), bool),
            jnp.zeros(batch, jnp.int32),
        )
        # The last position first: its token separates draws at least as well as any other's (measured).
        state = narrow(state, model.argmax_tokens(*at(last)))
        _, equal_BNN, decoded_B = jax.lax.fori_loop(1, last + 1, next_position, state)
    return Counted(equal_BNN.sum(-1, dtype=jnp.int32), is_first_of(equal_BNN), decoded_B)


def _argmax_of_kept(
    model: ChunkModel, x_BND: Array, prior_B1E: Array | None, kept_BN: Array
) -> Array:
    """The most likely tokens where `kept` is true, int32 [B, N]; computed in blocks of a fixed size, kept positions first."""
    num_draws, num_flat = kept_BN.shape[1], kept_BN.size
    block = max(_LEAST_TOGETHER, num_flat // _PARTS)
    if num_flat <= block:
        return model.argmax_tokens(x_BND, prior_B1E)
    x_RD = x_BND.reshape(num_flat, -1)
    order = jnp.argsort(~kept_BN.reshape(-1), stable=True)
    order = jnp.pad(order, (0, -num_flat % block), constant_values=num_flat)

    def decode(index: Array, token_R: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(order, index * block, block)
        own = jnp.minimum(rows, num_flat - 1)
        prior = None if prior_B1E is None else prior_B1E[own // num_draws, 0]
        return token_R.at[rows].set(model.argmax_tokens(x_RD[own], prior), mode="drop")

    num_blocks = -(-kept_BN.sum() // block)
    token_R = jax.lax.fori_loop(0, num_blocks, decode, jnp.zeros(num_flat, jnp.int32))
    return token_R.reshape(kept_BN.shape)
