"""Known distributions and statistical tests for the samplers."""

import numpy as np
import scipy.stats

PROBS = (0.5, 0.3, 0.2)
# Seeds are fixed; with another seed a correct program would fail a comparison once in a million times.
FALSE_ALARM = 1e-6
# A standard normal number is further from 0 than this once in a million times.
FAR = 4.9


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
