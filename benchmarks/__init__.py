"""Measurements of docs/benchmarks.md. Run `python -m benchmarks` or `python -m benchmarks.NAME` in a clone of the repository."""

# Before JAX is imported, for what the package sets in the environment.
import calm_jax  # noqa: F401
