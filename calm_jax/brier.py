"""BrierLM: a strictly proper score of a language model, estimated from its samples alone (paper, section 4).

P positions, S samples a position, K tokens a chunk; n counts the first n tokens of a chunk, 1 to 4.
"""

from typing import NamedTuple

import chex
import jax.numpy as jnp
import numpy as np
from jax import Array

ORDERS = 4


def brier_terms(sample_PSK: Array, target_PK: Array) -> Array:
    """Unbiased Brier terms of each position from S >= 2 samples of its chunk, [P, 4]; K >= 4.

    `2 mean_s 1[x_s = y] - mean_{s != r} 1[x_s = x_r]` over the first n tokens together, n = 1..4.
    S = 2 is the published estimator; more samples have the same expectation and less variance.
    """
    num_samples = sample_PSK.shape[1]
    chex.assert_shape(target_PK, (sample_PSK.shape[0], sample_PSK.shape[2]))
    first = slice(0, ORDERS)
    match_PS4 = jnp.cumprod(sample_PSK[..., first] == target_PK[:, None, first], axis=-1)
    left, right = sample_PSK[:, :, None, first], sample_PSK[:, None, :, first]
    same_PSS4 = jnp.cumprod(left == right, axis=-1)
    num_pairs = num_samples * (num_samples - 1)
    collisions_P4 = (same_PSS4.sum((1, 2)) - num_samples) / num_pairs
    return 2 * match_PS4.mean(1, dtype=jnp.float32) - collisions_P4


class BlockSums(NamedTuple):
    """Sums over blocks of what the score and its standard error need.

    total: [8], four sums of Brier terms and four counts of the positions that they run over.
    product: [8, 8], the sum over blocks of the outer product of a block's own eight numbers.
    blocks: how many blocks have any position.
    """

    total: Array
    product: Array
    blocks: Array


def block_sums(terms_BP4: Array, counted_BP4: Array) -> BlockSums:
    """Sums over a batch of blocks. counted: bool, which position counts for which n."""
    chex.assert_equal_shape([terms_BP4, counted_BP4])
    sums_B4 = jnp.where(counted_BP4, terms_BP4, 0).sum(1)
    each_B8 = jnp.concatenate([sums_B4, counted_BP4.sum(1, dtype=jnp.float32)], axis=-1)
    product = jnp.einsum("BI,BJ->IJ", each_B8, each_B8, precision="highest")
    return BlockSums(each_B8.sum(0), product, counted_BP4.any((1, 2)).sum())


class Score(NamedTuple):
    """BrierLM (0 to 100) with its standard error, and the four averages with theirs.

    standard_error is NaN where a factor is not positive (BrierLM is 0 there) or for a single block.
    """

    brierlm: float
    standard_error: float
    brier: tuple[float, ...]
    brier_error: tuple[float, ...]


def as_values(score: Score) -> dict[str, float]:
    """A score under the names that metrics use."""
    values = {"brierlm": score.brierlm, "brierlm_error": score.standard_error}
    for order, (value, error) in enumerate(zip(score.brier, score.brier_error, strict=True), 1):
        values |= {f"brier_{order}": value, f"brier_{order}_error": error}
    return values


def score(sums: BlockSums) -> Score:
    """The score of a whole split, on the host. Blocks are the clusters of a delta-method error."""
    total = np.asarray(sums.total, np.float64)
    blocks = int(sums.blocks)
    sums_4, counts_4 = total[:ORDERS], total[ORDERS:]
    if not counts_4.all():
        nan = (float("nan"),) * ORDERS
        return Score(float("nan"), float("nan"), nan, nan)
    brier_4 = sums_4 / counts_4
    # Row n: the gradient of average n with respect to the eight sums.
    gradient_48 = np.concatenate([np.diag(1 / counts_4), np.diag(-brier_4 / counts_4)], axis=1)
    # A block's contribution to average n has mean zero over blocks, so the sum of squares is enough.
    correction = blocks / (blocks - 1) if blocks > 1 else float("nan")
    covariance_44 = correction * gradient_48 @ np.asarray(sums.product, np.float64) @ gradient_48.T
    # A variance of 0 may come out as a rounding error below it.
    brier_error = tuple(np.sqrt(np.maximum(np.diag(covariance_44), 0)))
    if (brier_4 <= 0).any():
        return Score(0.0, float("nan"), tuple(brier_4), brier_error)
    brierlm = 100 * float(np.prod(brier_4)) ** (1 / ORDERS)
    direction_4 = brierlm / ORDERS / brier_4
    error = float(np.sqrt(max(direction_4 @ covariance_44 @ direction_4, 0)))
    return Score(brierlm, error, tuple(brier_4), brier_error)


def frequency_floor(train_PK: np.ndarray, target_BPK: np.ndarray, counted_BP4: np.ndarray) -> Score:
    """The score of predicting every chunk by the training chunks' frequencies; exact, on the host.

    Its Brier terms are `2 p_n(y) - sum p_n^2`, with p_n the frequencies of a chunk's first n tokens.
    """
    blocks, positions, _ = target_BPK.shape
    targets = target_BPK.reshape(blocks * positions, -1)
    both = np.concatenate([train_PK, targets]).astype(np.int64)
    vocab_size = both.max() + 1
    prefix = np.zeros(len(both), np.int64)
    terms = []
    for token in both.T[:ORDERS]:
        _, prefix = np.unique(prefix * vocab_size + token, return_inverse=True)
        count = np.bincount(prefix[: len(train_PK)], minlength=prefix.max() + 1)
        frequency = count / len(train_PK)
        terms.append(2 * frequency[prefix[len(train_PK) :]] - (frequency**2).sum())
    terms_BP4 = np.stack(terms, axis=-1).reshape(blocks, positions, ORDERS)
    return score(block_sums(jnp.asarray(terms_BP4, jnp.float32), jnp.asarray(counted_BP4)))
