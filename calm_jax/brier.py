"""BrierLM: a strictly proper score of a language model, estimated from its samples alone (paper, section 4).

For two independent samples x, x' of the next n tokens and the true tokens y, `brier_n = 2 P(x = y) - P(x = x')`: the
match term rewards accuracy, the collision term penalises a lack of diversity. BrierLM is 100 times the geometric mean
of brier_1 to brier_4, each averaged over a whole split.

B blocks, P starts of n-grams in each block, R starts that are continued together, S samples per position, K tokens per chunk, J
chunks drawn for one start, N numbers of tokens from K + 1 to 4, T tokens, W windows of the training text.
"""

import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from calm_jax.models.kv_cache import SegmentIds
from calm_jax.parallel.loops import map_positions
from calm_jax.sampling.chunk_model import ChunkModel

# The longest n-gram that is scored.
ORDERS = 4

# At most an eighth of a block's starts, rounded up, are continued together. The last of these groups is filled up with starts whose
# terms are 0; smaller groups waste fewer of them.
_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Which n-grams of a block are scored, and from how many samples.

    N-grams start where a chunk starts, except with `inner_starts`.

    Attributes:
        num_samples: S >= 2. Two samples are the published estimator; more have the same expectation and less variance.
        first_token: n-grams that start before this token of their block are not scored.
        start_every: only n-grams that start at a multiple of this many tokens are scored.
        inner_starts: with K > 4, score also the n-grams that start inside a chunk and have all four tokens in it. The
            tokens before them in the chunk are then sampled too, not given.
        skip_last_start: with K < 4, leave out the last start of a block, as the published code does.
    """

    num_samples: int
    first_token: int = 0
    start_every: int = 1
    inner_starts: bool = False
    skip_last_start: bool = False

    def starts(self, num_tokens: int, chunk_size: int) -> np.ndarray:
        """Where each scored n-gram begins in a block, ascending, [P]; the first chunk of a block is never predicted."""
        chunk = np.arange(chunk_size, num_tokens, chunk_size)
        starts = chunk[chunk + chunks_of(chunk_size) * chunk_size <= num_tokens]
        if self.skip_last_start and chunk_size < ORDERS:
            starts = starts[:-1]
        if self.inner_starts:
            offset = np.arange(max(chunk_size - ORDERS + 1, 1))
            starts = (starts[:, None] + offset).reshape(-1)
        return starts[(starts >= self.first_token) & (starts % self.start_every == 0)]


def chunks_of(chunk_size: int) -> int:
    """How many chunks an n-gram of four tokens covers if it starts at the first token of a chunk."""
    return -(-ORDERS // chunk_size)


def windows(starts_P: np.ndarray) -> np.ndarray:
    """The indices of the four tokens from each start on, [P, 4]."""
    return starts_P[:, None] + np.arange(ORDERS)


def counted(target_BT: Any, starts_P: np.ndarray, pad_id: int) -> Any:
    """For which n each start is scored, bool [B, P, 4]: where the first n tokens are neither masked nor pads."""
    is_text_BT = (target_BT >= 0) & (target_BT != pad_id)
    return is_text_BT[:, windows(starts_P)].cumprod(-1).astype(bool)


def collisions(sample_ST: Array) -> Array:
    """The share of pairs of samples whose first n tokens agree, [..., S, T] -> [..., T] for n = 1 .. T."""
    num_samples = sample_ST.shape[-2]
    same = jnp.cumprod(sample_ST[..., :, None, :] == sample_ST[..., None, :, :], axis=-1)
    return (same.sum((-3, -2)) - num_samples) / (num_samples * (num_samples - 1))


def agreement(sample_SK: Array) -> Array:
    """The share of the samples but the first that equal the first, [..., S, K] -> [...]."""
    return (sample_SK[..., 1:, :] == sample_SK[..., :1, :]).all(-1).mean(-1)


def chunk_collisions(model: ChunkModel, h_BD: Array, sample_BSK: Array, num_tokens: int) -> Array:
    """The collision terms of the first `num_tokens` tokens of one chunk, [B, num_tokens].

    They are those of the samples, or exactly `sum_v p_v^2` where the model knows its probabilities (K = 1).
    """
    if model.log_probs is None:
        return collisions(sample_BSK[..., :num_tokens])
    return jnp.exp(2 * model.log_probs(h_BD)).sum(-1, keepdims=True)


def path_collisions(
    model: ChunkModel,
    cache: Any,
    seen_B: Array,
    token_BK: Array,
    agree_B: Array,
    key_BJ: Array,
    num_samples: int,
) -> Array:
    """The collision terms of one start of each block beyond its first chunk (K < 4).

    Each later chunk is drawn S times after the true prefix and the first sample's own chunks. The term of n tokens is
    the product of `mean_{r != 1} 1[x_r = x_1]` over the chunks before the one that holds token n, times the collision
    of the tokens of that last chunk. The estimate is unbiased, because the first sample, whose path is followed, is
    independent of the other samples. Under `vmap` over starts, one forward pass per chunk serves all starts, and the
    cache is held once.

    Args:
        model: the model's `ChunkModel` interface.
        cache: the cache of the blocks' true chunks.
        seen_B: how many true chunks precede each block's start.
        token_BK: the first sample of each start's first chunk.
        agree_B: which share of the other samples of that chunk equal it. Where it is 0, so are the terms.
        key_BJ: one key per chunk; the first is not used, as the first chunk is given.
        num_samples: S.

    Returns:
        The collision terms for n = K + 1 to 4, [B, 4 - K].
    """
    chunk_size = token_BK.shape[1]
    num_chunks = chunks_of(chunk_size)
    memory = model.fork(cache, seen_B, num_chunks - 1)
    terms = []
    for index in range(1, num_chunks):
        h_B1D, memory = model.advance(token_BK[:, None], memory)
        h_BD = h_B1D[:, 0]
        sample_BSK = model.draw(h_BD, num_samples, key_BJ[:, index])
        left = min(chunk_size, ORDERS - index * chunk_size)
        terms.append(agree_B[:, None] * chunk_collisions(model, h_BD, sample_BSK, left))
        agree_B *= agreement(sample_BSK)
        token_BK = sample_BSK[:, 0]
    return jnp.concatenate(terms, axis=-1)


def agreeing_path_collisions(
    model: ChunkModel,
    cache: Any,
    seen_P: Array,
    sample_BPSK: Array,
    counted_BP: Array,
    key_BPJ: Array,
    at_once: int,
) -> Array:
    """The collision terms of all starts beyond their first chunks (K < 4).

    Only starts that count, and whose first sample equals another one, are continued, as the terms of the others are 0 or not
    asked for. They come first in each block's order, and are continued some at a time until no block has any left.

    Args:
        model, cache: as in `path_collisions`.
        seen_P: how many true chunks precede each start.
        sample_BPSK: the samples of the first chunks.
        counted_BP: bool, whose terms count.
        key_BPJ: one key per chunk of each start.
        at_once: the most starts of each block that are continued together.

    Returns:
        The terms for n = K + 1 to 4 of each start, [B, P, 4 - K]; 0 for starts that do not count.
    """
    batch, num_starts, num_samples, chunk_size = sample_BPSK.shape
    agree_BP = jnp.where(counted_BP, agreement(sample_BPSK), 0)
    order_BP = jnp.argsort(agree_BP == 0, axis=1)
    num_agreeing = (agree_BP > 0).sum(1).max()
    num_together = min(at_once, -(-num_starts // _PARTS))

    def path(seen_B: Array, token_BK: Array, agree_B: Array, key_BJ: Array) -> Array:
        return path_collisions(model, cache, seen_B, token_BK, agree_B, key_BJ, num_samples)

    def proceed(index: Array, terms_BPN: Array) -> Array:
        # The slice of the last part begins earlier where it would end beyond the last start.
        place_BR = jax.lax.dynamic_slice_in_dim(
            order_BP, index * num_together, num_together, axis=1
        )

        def of_starts(x_BP: Array) -> Array:
            return jax.vmap(lambda x_P, place_R: x_P[place_R])(x_BP, place_BR)

        token_BRK = of_starts(sample_BPSK[:, :, 0])
        starts = seen_P[place_BR], token_BRK, of_starts(agree_BP), of_starts(key_BPJ)
        new_BRN = jax.vmap(path, in_axes=1, out_axes=1)(*starts)
        return jax.vmap(lambda x_PN, place_R, new_RN: x_PN.at[place_R].set(new_RN))(
            terms_BPN, place_BR, new_BRN
        )

    nothing_BPN = jnp.zeros((batch, num_starts, ORDERS - chunk_size))
    return jax.lax.fori_loop(0, -(-num_agreeing // max(1, num_together)), proceed, nothing_BPN)


class Reading(NamedTuple):
    """What a model read of whole blocks, to score n-grams after each of their chunks.

    Attributes:
        h_BLD: the hidden states that predict each chunk but the first, [B, L-1, D].
        cache: of all chunks but the last; None where n-grams end in the chunk in which they begin (K >= 4).
    """

    h_BLD: Array
    cache: Any


def read(model: ChunkModel, token_BLK: Array, documents: SegmentIds | None) -> Reading:
    """Reads whole blocks, so that n-grams can be drawn after each of their chunks (`ChunkModel.fork`).

    Args:
        model: the model's `ChunkModel` interface.
        token_BLK: whole blocks.
        documents: the documents of all chunks of a block, [B, L], when they are isolated. The chunks
            that are drawn after true chunk i then see the true chunks that chunk i sees.
    """
    batch, num_chunks, chunk_size = token_BLK.shape
    if chunks_of(chunk_size) > 1:
        # Nothing is drawn after the last chunk.
        window = num_chunks - 1 if documents is None else documents.window()[:, :-1]
        return Reading(*model.advance(token_BLK[:, :-1], model.empty_cache(batch, 0, window)))
    # The last chunk is read too: L is a multiple of what kernels want, and L - 1 is not.
    h_BLD, _ = model.advance(token_BLK, documents)
    return Reading(h_BLD[:, :-1], None)


def brier_terms(
    model: ChunkModel,
    token_BLK: Array,
    reading: Reading,
    key_BLJ: Array,
    protocol: Protocol,
    chunks_at_once: int,
    paths_at_once: int,
    counted_BP4: Array | None = None,
) -> Array:
    """Unbiased estimates of brier_1 to brier_4 at every start of a protocol.

    Where documents are isolated, terms of a start in a document's first chunk are meaningless; its targets are masked, so that
    `counted` leaves them out.

    Args:
        model: the model's `ChunkModel` interface. With `log_probs` (K = 1) the match terms are exact, and so is the
            collision of the last token of each n-gram.
        token_BLK: whole blocks.
        reading: of these blocks, from `read`.
        key_BLJ: [B, L-1, J]: for each chunk but the first of a block, the key of its samples and the keys of the up
            to three chunks that are drawn after it.
        protocol: which n-grams are scored, from how many samples.
        chunks_at_once: how many positions are sampled together; bounds memory.
        paths_at_once: the most starts of each block that are continued together (K < 4); bounds memory.
        counted_BP4: which terms count, from `counted`; the others are not computed where that takes a forward pass, and
            are then wrong. None: all.

    Returns:
        float32 [B, P, 4].
    """
    batch, num_chunks, chunk_size = token_BLK.shape
    starts_P = protocol.starts(num_chunks * chunk_size, chunk_size)
    if not len(starts_P):
        # Records with prompts may be this short.
        return jnp.zeros((batch, 0, ORDERS))
    spans_chunks = chunks_of(chunk_size) > 1
    h_BLD, cache = reading

    # The Q chunks that hold a token of any scored n-gram. Chunk i is predicted from hidden state i - 1.
    window_P4 = windows(starts_P)
    needed_Q = np.unique(window_P4 // chunk_size)
    place_P4 = np.searchsorted(needed_Q, window_P4 // chunk_size)

    def draw(xs: tuple[Array, Array, Array]) -> tuple[Array, Array | None, Array | None]:
        h_BD, key_B, token_B = xs
        sample_BSK = model.draw(h_BD, protocol.num_samples, key_B)
        collision_BK = (
            chunk_collisions(model, h_BD, sample_BSK, chunk_size) if spans_chunks else None
        )
        if model.log_probs is None:
            return sample_BSK, None, collision_BK
        log_prob_B = jnp.take_along_axis(model.log_probs(h_BD), token_B[:, None], axis=-1)[:, 0]
        return sample_BSK, log_prob_B, collision_BK

    def of_chunks(x: Array, chunk: np.ndarray) -> Array:
        return x[:, chunk].swapaxes(0, 1)

    xs: tuple[Array, ...] = (
        of_chunks(h_BLD, needed_Q - 1),
        of_chunks(key_BLJ[:, :, 0], needed_Q - 1),
        of_chunks(token_BLK[..., 0], needed_Q),
    )
    sample_QBSK, log_prob_QB, collision_QBK = map_positions(draw, chunks_at_once, xs)

    # [B, S, P, 4]: the samples' tokens, each drawn with the true chunks before it.
    sample_BSP4 = jnp.moveaxis(sample_QBSK[place_P4, :, :, window_P4 % chunk_size], (2, 3), (0, 1))
    if model.log_probs is None:
        target_BP4 = token_BLK.reshape(batch, -1)[:, window_P4]
        match_BP4 = jnp.cumprod(sample_BSP4 == target_BP4[:, None], axis=-1).mean(1)
    else:
        match_BP4 = jnp.exp(jnp.cumsum(jnp.moveaxis(log_prob_QB[place_P4], -1, 0), axis=-1))

    if spans_chunks:
        first_P = place_P4[:, 0]
        chunk_P = starts_P // chunk_size
        rest_BPN = agreeing_path_collisions(
            model,
            cache,
            jnp.asarray(chunk_P, jnp.int32),
            sample_QBSK[first_P].swapaxes(0, 1),
            jnp.asarray(True) if counted_BP4 is None else counted_BP4[..., chunk_size],
            key_BLJ[:, chunk_P - 1],
            paths_at_once,
        )
        collision_BP4 = jnp.concatenate([collision_QBK[first_P].swapaxes(0, 1), rest_BPN], axis=-1)
    else:
        # A few positions at a time, because the comparison of all pairs of samples takes memory.
        sample_PBS4 = jnp.moveaxis(sample_BSP4, 2, 0)
        collision_PB4 = map_positions(collisions, chunks_at_once, sample_PBS4)
        collision_BP4 = collision_PB4.swapaxes(0, 1)
    return 2 * match_BP4 - collision_BP4


class BlockSums(NamedTuple):
    """Sums over blocks, from which BrierLM and its standard error are computed. They add up over batches.

    Attributes:
        total: [8], the sum of the Brier terms for each n, then the number of positions for each n.
        product: [8, 8], the sum over blocks of the outer product of the block's own eight numbers.
        blocks: the number of blocks with at least one position.
    """

    total: Array
    product: Array
    blocks: Array


def block_sums(terms_BP4: Array, counted_BP4: Array) -> BlockSums:
    """The sums over a batch of blocks; only the terms where `counted` (bool) is true count."""
    chex.assert_equal_shape([terms_BP4, counted_BP4])
    sums_B4 = jnp.where(counted_BP4, terms_BP4, 0).sum(1)
    return sums_of(jnp.concatenate([sums_B4, counted_BP4.sum(1, dtype=jnp.float32)], axis=-1))


def sums_of(each_B8: Array) -> BlockSums:
    """The sums over blocks, from each block's eight numbers: its sum of terms for each n, then its number of positions."""
    product = jnp.einsum("BI,BJ->IJ", each_B8, each_B8, precision="highest")
    return BlockSums(each_B8.sum(0), product, each_B8[:, ORDERS:].any(-1).sum())


class Score(NamedTuple):
    """BrierLM of a split, and its four factors.

    Attributes:
        brierlm: from 0 to 100; 0 when a factor is not positive, NaN when no n-gram of four tokens is scored.
        standard_error: of brierlm; NaN when a factor is not positive, or for a single block.
        brier: brier_1 to brier_4, averaged over the split, unscaled.
        brier_error: their standard errors.
        ngrams: how many n-grams of four tokens were scored.
    """

    brierlm: float
    standard_error: float
    brier: tuple[float, ...]
    brier_error: tuple[float, ...]
    ngrams: int


def as_values(score: Score) -> dict[str, float]:
    """The score as metrics: `brierlm`, `brierlm_error`, `ngrams`, `brier_1`, `brier_1_error`, ..."""
    values = {"brierlm": score.brierlm, "brierlm_error": score.standard_error}
    values["ngrams"] = score.ngrams
    for order, (value, error) in enumerate(zip(score.brier, score.brier_error, strict=True), 1):
        values |= {f"brier_{order}": value, f"brier_{order}_error": error}
    return values


def score(sums: BlockSums) -> Score:
    """The score of a whole split, on the host; standard errors by the delta method, with blocks as clusters."""
    total = np.asarray(sums.total, np.float64)
    blocks = int(sums.blocks)
    sums_4, counts_4 = total[:ORDERS], total[ORDERS:]
    if not counts_4.all():
        nan = (float("nan"),) * ORDERS
        return Score(float("nan"), float("nan"), nan, nan, 0)
    brier_4 = sums_4 / counts_4
    ngrams = int(counts_4[-1])
    # Row n: the gradient of the average brier_n with respect to the eight sums.
    gradient_48 = np.concatenate([np.diag(1 / counts_4), np.diag(-brier_4 / counts_4)], axis=1)
    # A block's contribution to an average has mean zero over blocks, so its variance needs the sum of squares alone.
    correction = blocks / (blocks - 1) if blocks > 1 else float("nan")
    covariance_44 = correction * gradient_48 @ np.asarray(sums.product, np.float64) @ gradient_48.T
    # Rounding may make a variance of 0 negative.
    brier_error = tuple(np.sqrt(np.maximum(np.diag(covariance_44), 0)))
    if (brier_4 <= 0).any():
        return Score(0.0, float("nan"), tuple(brier_4), brier_error, ngrams)
    brierlm = 100 * float(np.prod(brier_4)) ** (1 / ORDERS)
    direction_4 = brierlm / ORDERS / brier_4
    error = float(np.sqrt(max(direction_4 @ covariance_44 @ direction_4, 0)))
    return Score(brierlm, error, tuple(brier_4), brier_error, ngrams)


def frequency_floor(train_W4: np.ndarray, target_BP4: np.ndarray, counted_BP4: np.ndarray) -> Score:
    """The score of the context-free model that samples n-grams by their frequency in the training text.

    A floor for trained models. Its Brier terms are exact.

    Args:
        train_W4: four-token windows of the training text.
        target_BP4: the scored windows of each block.
        counted_BP4: bool, for which n each window is scored (see `counted`).
    """
    terms_BP4 = frequency_terms(train_W4, target_BP4)
    return score(block_sums(jnp.asarray(terms_BP4, jnp.float32), jnp.asarray(counted_BP4)))


def frequency_terms(train_W4: np.ndarray, target_BP4: np.ndarray) -> np.ndarray:
    """The exact Brier terms of sampling n-grams by their frequency, `2 p_n(y) - sum p_n^2`, float64 [B, P, 4].

    p_n are the frequencies of the first n of four tokens in the training text, 0 without any window in it. Computed on the host.
    """
    vocab_size = 1 + int(max(train_W4.max(initial=0), target_BP4.max(initial=0)))
    prefix_W = np.zeros(len(train_W4), np.int64)
    prefix_BP = np.zeros(target_BP4.shape[:-1], np.int64)
    # The number of values that a prefix may have.
    bound = 1
    terms = []
    for order in range(ORDERS):
        # A prefix is the number whose digits are its tokens. Where 64 bits do not hold one digit more, it becomes its place among the
        # prefixes of the training text.
        if bound * vocab_size > np.iinfo(np.int64).max:
            distinct, prefix_W = np.unique(prefix_W, return_inverse=True)
            prefix_BP = _places(distinct, prefix_BP)
            bound = len(distinct) + 1
        bound *= vocab_size
        prefix_W = prefix_W * vocab_size + train_W4[:, order]
        prefix_BP = prefix_BP * vocab_size + target_BP4[..., order]
        distinct, count = np.unique(prefix_W, return_counts=True)
        frequency = np.append(count, 0) / max(len(train_W4), 1)
        terms.append(2 * frequency[_places(distinct, prefix_BP)] - (frequency**2).sum())
    return np.stack(terms, axis=-1)


def _places(distinct: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Where each of `x` is among distinct ascending numbers; `len(distinct)` for those that are not among them."""
    place = np.searchsorted(distinct, x)
    return np.where(np.append(distinct, -1)[place] == x, place, len(distinct))
