"""What all commands share: flags, one-line errors, signals, progress, files that are written atomically.

Nothing here imports JAX. This folder may import calm_jax.errors only.
"""
