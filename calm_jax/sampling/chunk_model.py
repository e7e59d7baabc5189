"""`ChunkModel`: the interface of a model to BrierLM, temperature sampling and generation.

They use nothing else of a model. So a new head works with all of them, and tests can use a known distribution in a
head's place.

B rows, P positions, N draws of each, K tokens per chunk, R any flattened axes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import chex
from jax import Array

from calm_jax.models.kv_cache import KVCache, Memory
from calm_jax.parallel.devices import target_device

# The largest array of logits that decoding holds at once, in elements: 256 MiB in float32.
_MAX_LOGITS = 2**26
# On a CPU 32 MiB, with which decoding is as fast as with larger arrays. A process grows by several times as much, because XLA
# allocates the arrays of the next batch before it frees those of the last.
_MAX_LOGITS_ON_CPU = 2**23


@dataclasses.dataclass(frozen=True)
class ChunkModel:
    """A model as functions of arrays, with its parameters bound.

    The autoencoder's decoder comes in two steps, `unfold` and `argmax_tokens`, so that samplers can decode some of a
    chunk's K positions and skip the others.

    Attributes:
        latents: `(h_PD, num_draws, key_P, noise_scale) -> [P, N, Z]`, latents of draws of the next chunk. A noise_scale
            of 1 draws from the model's own distribution.
        unfold: `latent_RZ -> [R, K, D]`, one feature vector for each of the K positions of a latent's chunk.
        argmax_tokens: `(x, prior) -> int32 [...]`, the most likely token at each unfolded position [..., D]; the
            expensive part of decoding, as it computes V logits. The prior, [..., E], is what `prior` gives for these
            positions, with axes that broadcast against those of x, or None.
        advance: `(tokens_BLK, memory) -> (h_BLD, memory)`, reads chunks after those in a cache or fork, and returns
            it extended by them.
        empty_cache: `(batch, size, window) -> cache` with room for `size` chunks, or with `size` 0 for the chunks of its
            first read; each chunk sees the last `window` (see `KVCache`).
        fork: `(cache, length_B, size) -> fork` that continues the first `length` chunks of a cache by up to `size`
            chunks of its own, and leaves the cache unchanged (see `Fork`).
        log_probs: `h_PD -> [P, V]`, log-probabilities of the next token, for a model that knows them (K = 1, and its
            latents are the tokens); None for a model that can only be sampled.
        prior: `h_PD -> [P, K, E]`, features of a prior over the K tokens, whose logits `argmax_tokens` adds to those of
            each draw; None for a model that adds nothing.
    """

    latents: Callable[[Array, int, Array, float], Array]
    unfold: Callable[[Array], Array]
    argmax_tokens: Callable[[Array, Array | None], Array]
    # Any: `advance` returns the kind of memory that it was given, which the type Callable cannot express.
    advance: Callable[[Array, Memory | None], tuple[Array, Any]]
    empty_cache: Callable[[int, int, int | Array], KVCache]
    fork: Callable[[KVCache, Array, int], Memory]
    log_probs: Callable[[Array], Array] | None
    prior: Callable[[Array], Array] | None

    def with_prior_times(self, scale: float) -> "ChunkModel":
        """The model with the logits of its prior, if it has one, multiplied by `scale`."""
        prior = self.prior
        if prior is None or scale == 1:
            return self
        return dataclasses.replace(self, prior=lambda h_PD: scale * prior(h_PD))

    def prior_of(self, h_PD: Array) -> Array | None:
        """The prior's features for all draws of each chunk, [P, 1, K, E], or None."""
        return None if self.prior is None else self.prior(h_PD)[:, None]

    def unfold_draws(self, latent_PNZ: Array) -> Array:
        """`unfold` for N latents of each position, [P, N, K, D]."""
        x_RKD = self.unfold(latent_PNZ.reshape(-1, latent_PNZ.shape[-1]))
        return x_RKD.reshape(*latent_PNZ.shape[:2], *x_RKD.shape[1:])

    def decode(self, h_PD: Array, latent_PNZ: Array) -> Array:
        """The most likely token at each of the K positions of each latent of the chunks after `h`, int32 [P, N, K]."""
        return self.argmax_tokens(self.unfold_draws(latent_PNZ), self.prior_of(h_PD))

    def draw(self, h_PD: Array, num_draws: int, key_P: Array) -> Array:
        """Independent draws of the next chunk, int32 [P, N, K]; each position's draws come from its own key."""
        chex.assert_equal_shape_prefix([h_PD, key_P], 1)
        return self.decode(h_PD, self.latents(h_PD, num_draws, key_P, 1))


def at_once(size: int) -> int:
    """How many items of `size` logits (array elements) each may be computed together; at least 1."""
    most = _MAX_LOGITS_ON_CPU if target_device().platform == "cpu" else _MAX_LOGITS
    return max(1, most // size)
