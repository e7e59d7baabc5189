"""Measurements of docs/benchmarks.md. Run `python -m benchmarks` or `python -m benchmarks.NAME` in a clone of the repository."""

import pathlib

# Imported before JAX, which reads environment variables that calm_jax sets.
import calm_jax  # noqa: F401

# The clone of the repository.
ROOT = pathlib.Path(__file__).parent.parent
