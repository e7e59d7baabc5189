"""Random chunks in the training of the autoencoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from calm_jax.tasks.autoencoder import with_random_chunks

L, K, V, PAD = 30_000, 4, 50, 49
# A statistic further than this from its expectation fails: false alarms 6e-6 for each of the 11.
SIGMAS = 4.5


@pytest.fixture(scope="module")
def replaced():
    """Chunks of the tokens 0 to 9, and the same with a share of 0.3 replaced."""
    tokens_LK = jax.random.randint(jax.random.key(1), (L, K), 0, 10)
    return tokens_LK, np.asarray(with_random_chunks(tokens_LK, jax.random.key(0), 0.3, V, PAD))


def is_near(hits: int, trials: int, probability: float) -> bool:
    law = stats.binom(trials, probability)
    return abs(hits - law.mean()) < SIGMAS * law.std()


def test_each_kind_of_chunk_has_a_third_of_the_share(replaced):
    tokens_LK, new_LK = replaced
    kept = (tokens_LK == new_LK).all(-1)
    # Equal by chance: shuffled tokens in one of 10^4 chunks.
    assert is_near(kept.sum(), L, 0.7 + 0.1 * 10.0**-K)
    # Tokens of the text in random order: chunks without another token that have changed. Of uniform chunks few look so.
    of_text = (new_LK < 10).all(-1) & ~kept
    assert is_near(of_text.sum(), L, (0.1 + (0.1 + 0.1 / K) * 0.2**K) * (1 - 10.0**-K))


@pytest.mark.parametrize("place", range(K))
def test_other_chunks_are_uniform_up_to_their_pads(replaced, place):
    _, new_LK = replaced
    # Tokens that the text does not have, or the pad, which both uniform kinds have at each place before their end.
    foreign = (new_LK >= 10) & (new_LK < PAD)
    share_before_end = 0.1 + 0.1 * (K - place) / K
    assert is_near(foreign[:, place].sum(), L, share_before_end * (PAD - 10) / V)
    pads = new_LK[:, place] == PAD
    assert is_near(pads.sum(), L, share_before_end / V + 0.1 * place / K)


def test_shuffled_tokens_are_those_of_the_row():
    """With a share of 1 a third are shuffled: the tokens that only one chunk has are found elsewhere."""
    tokens_LK = jnp.arange(300 * K).reshape(300, K)
    new_LK = with_random_chunks(tokens_LK, jax.random.key(2), 1.0, 1, 0)
    moved = np.asarray(new_LK[(new_LK > 0).all(-1)])
    assert len(moved) > 70 and len(np.unique(moved)) == moved.size
