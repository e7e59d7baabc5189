"""Code that all commands share: flags, one-line errors, signals, progress, and atomic writing of files.

Nothing here imports JAX. This folder may import calm_jax.errors only.
"""
