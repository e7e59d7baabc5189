"""The old name of `calm_jax.sampling.temperature`, for notebooks and scripts that import it."""

import sys

from calm_jax.sampling import temperature

sys.modules[__name__] = temperature
