"""The old name of `calm_jax.sampling.samplers`, for notebooks and scripts that import it."""

import sys

from calm_jax.sampling import samplers

sys.modules[__name__] = samplers
