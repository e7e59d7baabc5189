"""What everything that samples stands on: a model's primitives, `draw`, and `pool`, which counts equal draws.

BrierLM, temperature sampling and generation use nothing else of a model, so that each head gets all
of them, and a known distribution can be put in a head's place.

B rows, N draws of each, K tokens a chunk, R anything flat.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import Array

from calm_jax.models.transformer import KVCache, Memory

# Largest array of logits that decoding holds at once, in elements: 256 MiB in float32.
_MAX_LOGITS = 2**26
# At least so many draws' tokens at one position are decoded together while pools are pruned, and at least such a share
# of all: smaller blocks waste less of the last one, larger ones fill the device.
_LEAST_TOGETHER, _PARTS = 32, 8


@dataclasses.dataclass(frozen=True)
class ChunkModel:
    """A model as the samplers see it, its parameters bound.

    latents: `(h_PD, num_draws, key_P, noise_scale) -> [P, N, Z]`, draws of the next chunk's latent; a
    noise_scale of 1 is the model's own law.
    unfold: `[R, Z] -> [R, K, D]`, the beginning of each of a latent's K tokens.
    likeliest: `[R, D] -> [R]`, the most likely token of unfolded positions; the dear part of decoding.
    advance: `(tokens_BLK, memory) -> h_BLD, memory`, reads chunks after those in a cache or fork.
    empty_cache: `(batch, size, window) -> cache` for `size` chunks, each of which sees the last `window` (see `KVCache`).
    fork: `(cache, length_B, size) -> memory` that goes on after a cache's first `length` chunks, by
    up to `size` of its own, and leaves the cache as it is.
    log_probs: `h_PD -> [P, V]` for a model that knows the probabilities of its next token (K = 1, and
    its latents are the tokens); None for one that can only be sampled.
    """

    latents: Callable[[Array, int, Array, float], Array]
    unfold: Callable[[Array], Array]
    likeliest: Callable[[Array], Array]
    advance: Callable[[Array, Memory | None], tuple[Array, Memory | None]]
    empty_cache: Callable[[int, int, int | Array], KVCache]
    fork: Callable[[KVCache, Array, int], Memory]
    log_probs: Callable[[Array], Array] | None

    def decode(self, latent_PNZ: Array) -> Array:
        """The most likely tokens of each latent, [P, N, K]."""
        positions, num_draws, _ = latent_PNZ.shape
        x_RKD = self.unfold(latent_PNZ.reshape(positions * num_draws, -1))
        token_R = self.likeliest(x_RKD.reshape(-1, x_RKD.shape[-1]))
        return token_R.reshape(positions, num_draws, -1)

    def draw(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Independent draws of the next chunk, [P, N, K]; those of a position from its own key."""
        chex.assert_equal_shape_prefix([h_PD, key_P], 1)
        return self.decode(self.latents(h_PD, num_draws, key_P, 1))


def at_once(size: int) -> int:
    """How many things of `size` logits each may be decoded together."""
    return max(1, _MAX_LOGITS // size)


class Counted(NamedTuple):
    """count: [B, N], how often a draw's chunk stands in its pool. decoded: [B], tokens that were decoded for it."""

    count: Array
    decoded: Array


def count_draws(model: ChunkModel, latent_BNZ: Array, company: int) -> Counted:
    """Counts equal chunks among each row's draws without decoding all of them (ours).

    One position of all draws is decoded, then the next one of those draws alone whose tokens so far
    at least `company` draws share. Counts from `company` on are those of the whole chunks; the others
    are some number below it. With company = 2 all are right: who is alone counts 1.
    """
    batch, num_draws, _ = latent_BNZ.shape
    with jax.named_scope("count"):
        x_RKD = model.unfold(latent_BNZ.reshape(batch * num_draws, -1))
        last = x_RKD.shape[1] - 1
        # No two draws that are left out are equal.
        nobody_BN = -1 - jnp.arange(num_draws) + jnp.zeros((batch, 1), jnp.int32)

        def narrow(state: tuple[Array, Array, Array], token_R: Array):
            kept_BN, equal_BNN, decoded_B = state
            token_BN = jnp.where(kept_BN, token_R.reshape(batch, num_draws), nobody_BN)
            equal_BNN &= token_BN[:, :, None] == token_BN[:, None]
            decoded_B += kept_BN.sum(-1)
            return kept_BN & (equal_BNN.sum(-1) >= company), equal_BNN, decoded_B

        def next_position(index: Array, state: tuple[Array, Array, Array]):
            x_RD = jax.lax.dynamic_index_in_dim(x_RKD, last - index, axis=1, keepdims=False)
            return narrow(state, _likeliest_of_kept(model, x_RD, state[0].reshape(-1)))

        state = (
            jnp.ones((batch, num_draws), bool),
            jnp.ones((batch, num_draws, num_draws), bool),
            jnp.zeros(batch, jnp.int32),
        )
        # A chunk's last token tells at least as much as any other about whether it has company (measured).
        state = narrow(state, model.likeliest(x_RKD[:, last]))
        _, equal_BNN, decoded_B = jax.lax.fori_loop(1, last + 1, next_position, state)
    return Counted(equal_BNN.sum(-1, dtype=jnp.int32), decoded_B)


def _likeliest_of_kept(model: ChunkModel, x_RD: Array, kept_R: Array) -> Array:
    """The likeliest tokens where `kept`, [R]; those that are kept come first and go by in fixed blocks."""
    num_flat = len(x_RD)
    block = max(_LEAST_TOGETHER, num_flat // _PARTS)
    if num_flat <= block:
        return model.likeliest(x_RD)
    order = jnp.argsort(~kept_R, stable=True)
    order = jnp.pad(order, (0, -num_flat % block), constant_values=num_flat)

    def decode(index: Array, token_R: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(order, index * block, block)
        token = model.likeliest(x_RD[jnp.minimum(rows, num_flat - 1)])
        return token_R.at[rows].set(token, mode="drop")

    num_blocks = -(-kept_R.sum() // block)
    return jax.lax.fori_loop(0, num_blocks, decode, jnp.zeros(num_flat, jnp.int32))


def for_active(
    step: Callable[[Any], Any], active_B: Array, group: int, fixed: Any, state: Any
) -> Any:
    """Applies `step` to the active rows alone, `group` of them at a time, and writes what it returns.

    fixed, state: trees of [B, ...]. step: `(fixed, state) -> state` over [group, ...]. A place that an
    inactive row would take goes to the next active one, so that a batch does not wait for the rows
    that are done.
    """
    batch = len(active_B)
    group = min(group, batch)
    order = jnp.argsort(~active_B, stable=True)
    order = jnp.pad(order, (0, -batch % group), constant_values=batch)
    num_active = active_B.sum()

    def apply(index: Array, state: Any) -> Any:
        rows = jax.lax.dynamic_slice_in_dim(order, index * group, group)
        is_active = index * group + jnp.arange(group) < num_active
        own_fixed, own_state = jax.tree.map(
            lambda x: x[jnp.minimum(rows, batch - 1)], (fixed, state)
        )
        target = jnp.where(is_active, rows, batch)
        return jax.tree.map(
            lambda x, new: x.at[target].set(new, mode="drop"), state, step(own_fixed, own_state)
        )

    return jax.lax.fori_loop(0, -(-num_active // group), apply, state)
