"""Independent streams of random numbers, all from a config's one seed."""

import zlib

import jax
from jax import Array


def stream(seed: int, name: str) -> Array:
    """The key of a stream; two names have nothing in common, whatever is folded in afterwards."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode("utf-8")))
