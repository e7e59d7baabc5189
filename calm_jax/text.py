"""The old name of `calm_jax.run.generator`, for notebooks and scripts that import it; new code imports from `calm_jax`."""

import sys

from calm_jax.run import generator

sys.modules[__name__] = generator
