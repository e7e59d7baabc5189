"""Known distributions, models that have them, and statistical tests for the samplers.

A model's latent is a chunk's index; its "hidden state" is the row of a table of distributions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from calm_jax.sampling.chunk_model import ChunkModel

PROBS = (0.5, 0.3, 0.2)
# Seeds are fixed; with another seed a correct program would fail a comparison once in a million times.
FALSE_ALARM = 1e-6
# A standard normal number is further from 0 than this once in a million times.
FAR = 4.9
# Chunks of two tokens; among the first nine, every chunk shares its first token with others, and its second too.
BOOK = np.array([(c % 3, c // 3) for c in range(2000)], np.int32)


def power(probs, s: float) -> np.ndarray:
    """`p^s`, normalised."""
    weight = np.asarray(probs, float) ** s
    return weight / weight.sum()


def p_value(counts, law) -> float:
    """Of a chi-square test that the counts are draws of a distribution; 0 if something of probability 0 was drawn."""
    counts, law = np.asarray(counts), np.asarray(law, float)
    assert counts.shape == law.shape
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    expected = counts.sum() * law[possible] / law.sum()
    return float(scipy.stats.chisquare(counts[possible], expected).pvalue)


def compositions(total: int, parts: int) -> np.ndarray:
    """All counts of `parts` chunks in `total` draws, [number, parts]."""
    if parts == 1:
        return np.array([[total]])
    return np.concatenate(
        [
            np.pad(compositions(total - c, parts - 1), ((0, 0), (1, 0)), constant_values=c)
            for c in range(total + 1)
        ]
    )


def known_model(*law_table, book=BOOK):
    """A model of some distributions over the chunks of `book`; a row's hidden state is the number of its distribution."""
    most = max(map(len, law_table))
    table = np.array([np.pad(law, (0, most - len(law))) for law in law_table])
    with np.errstate(divide="ignore"):
        log_table = jnp.asarray(np.log(table), jnp.float32)

    def latents(h_PD, num_draws, key_P, noise_scale):
        draw = jax.vmap(lambda key, law: jax.random.categorical(key, law, shape=(num_draws, 1)))
        return draw(key_P, log_table[h_PD[:, 0].astype(jnp.int32)]).astype(jnp.float32)

    return model_of(latents, book)


def model_of(latents, book=BOOK):
    """A model whose latents are indices of chunks. A position unfolds to two features, both its token id."""

    def unfold(latent_R1):
        token_RK = jnp.asarray(book)[latent_R1[:, 0].astype(jnp.int32)]
        return jnp.stack([token_RK, token_RK], axis=-1).astype(jnp.float32)

    def argmax_tokens(x, prior):
        return (x.sum(-1) / 2).astype(jnp.int32)

    return ChunkModel(latents, unfold, argmax_tokens, None, None, None, None, None)
