"""Options for `jax.jit` in tests."""

# Tests compile without optimisation (conftest.py). With it, programs that compute for seconds take less time in all.
OPTIMISED = {"xla_backend_optimization_level": 1}
