"""Checksums of arrays that may be spread over devices and processes.

A checksum depends on an array's values, shape and dtype alone: it is the same for every sharding and number of processes,
because it is a sum of integers over the elements. Each element contributes a hash of its bits and its position. A change of
one element always changes the checksum; a change of several goes unnoticed in about one case in 2**64.
"""

import concurrent.futures
import math
import threading
from typing import Any

import jax
import numpy as np

from calm_jax.parallel import multihost
from calm_jax.parallel.devices import num_cores

# Elements that are hashed at once, so that they stay in a CPU's cache.
_BLOCK = 2**15
_MASK = 2**32 - 1
_ONE_COPY = threading.Lock()


def _hash_sums(x: np.ndarray, first: list[int], shape: tuple[int, ...]) -> tuple[int, int]:
    """The sums, modulo 2**32, of two hashes of every element of a shard.

    Both hashes change with any bit of the element, because every operation of the hash is invertible.

    Args:
      x: the shard, of a type of at most 32 bits.
      first: the index of its first element along each axis of the whole array.
      shape: the shape of the whole array.
    """
    # Positions are modulo 2**32, so they repeat in an array of more elements. They only have to differ for most elements.
    rows_R, columns_C = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    for axis, (start, size) in enumerate(zip(first, x.shape, strict=True)):
        stride = math.prod(shape[axis + 1 :])
        along = ((start + np.arange(size)) * stride & _MASK).astype(np.uint32)
        if axis < x.ndim - 1:
            rows_R = (rows_R[:, None] + along).reshape(-1)
        else:
            columns_C = along
    bits = np.ascontiguousarray(x).view(f"uint{8 * x.dtype.itemsize}")
    bits_RC = bits.reshape(len(rows_R), len(columns_C))
    sums = [0, 0]
    rows = max(1, _BLOCK // max(1, len(columns_C)))
    for row in range(0, len(rows_R), rows):
        for column in range(0, len(columns_C), _BLOCK):
            here = np.s_[row : row + rows, column : column + _BLOCK]
            odd = rows_R[here[0], None] + columns_C[here[1]]
            odd <<= 1
            odd |= 1
            # The finaliser of MurmurHash3.
            hashed = bits_RC[here] * odd
            hashed ^= hashed >> 16
            hashed *= np.uint32(0x85EBCA6B)
            hashed ^= hashed >> 13
            hashed *= np.uint32(0xC2B2AE35)
            hashed ^= hashed >> 16
            sums[0] += int(hashed.sum(dtype=np.uint64))
            hashed *= odd
            sums[1] += int(hashed.sum(dtype=np.uint64))
    return sums[0] & _MASK, sums[1] & _MASK


def _on_host(shard: Any) -> np.ndarray:
    if shard.device.platform == "cpu":
        return np.asarray(shard.data)
    # JAX keeps the host copy of an array as long as the array itself. So the shard is first copied on its device, and only this
    # copy is read, to be freed together with its host copy. One shard at a time, as the device may have no room for more.
    with _ONE_COPY:
        return np.asarray(jax.device_put(shard.data, shard.device, may_alias=False))


def checksums(tree: Any) -> dict[str, str]:
    """The checksum of every `jax.Array` of a tree, by its path: 16 hexadecimal digits each.

    Every process hashes the shards that it holds; all processes must call it. It waits until the arrays are computed.
    """
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="/"): array
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
    }
    shards = [
        (name, array, shard)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        # Of the replicas of a shard on several devices only one is hashed.
        if shard.replica_id == 0
    ]

    def sums_of(named: tuple[str, jax.Array, Any]) -> tuple[int, int]:
        _, array, shard = named
        first = [axis.start or 0 for axis in shard.index]
        return _hash_sums(_on_host(shard), first, array.shape)

    with concurrent.futures.ThreadPoolExecutor(num_cores()) as threads:
        here = [
            [name, *sums]
            for (name, _, _), sums in zip(shards, threads.map(sums_of, shards), strict=True)
        ]
    totals = {name: [0, 0] for name in arrays}
    for name, a, b in (found for process in multihost.all_gather(here) for found in process):
        totals[name] = [totals[name][0] + a & _MASK, totals[name][1] + b & _MASK]
    return {name: f"{a:08x}{b:08x}" for name, (a, b) in totals.items()}
