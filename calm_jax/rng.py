"""Independent, named streams of random numbers from one seed."""

import zlib

import jax
from jax import Array


def stream(seed: int, name: str) -> Array:
    """The root key of a named stream. Streams of two names stay independent, whatever is folded into their keys."""
    return named(jax.random.key(seed), name)


def named(key: Array, name: str) -> Array:
    """The key of a named stream that is derived from another key, such as the key of a row."""
    return jax.random.fold_in(key, zlib.crc32(name.encode("utf-8")))
