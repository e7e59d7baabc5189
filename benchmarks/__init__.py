"""Measurements of docs/benchmarks.md. Run `python -m benchmarks` or `python -m benchmarks.NAME` in a clone of the repository."""

# Imported before JAX, which reads environment variables that calm_jax sets.
import calm_jax  # noqa: F401
