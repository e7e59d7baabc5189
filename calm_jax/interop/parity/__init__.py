"""Compares this project with recorded numbers of the published code (`calm_jax.interop.verify`). Begin with cases.py."""
