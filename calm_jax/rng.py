"""Independent streams of random numbers, all from a config's one seed."""

import zlib

import jax
from jax import Array


def stream(seed: int, name: str) -> Array:
    """The root key of a named stream. Streams of two names stay independent, whatever is folded into their keys."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode("utf-8")))
