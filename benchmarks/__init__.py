"""Measurements of docs/benchmarks.md. Run `python -m benchmarks` or `python -m benchmarks.NAME` in a clone of the repository."""
