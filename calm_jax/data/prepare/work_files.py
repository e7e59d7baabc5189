"""The intermediate files of a preparation. All have checksums, and several processes may write the same file at once.

A file is a JSON value, or rows of integers, of which a range can be read without the rest.
"""

import bisect
import pathlib
import uuid
import zlib
from typing import Any

import numpy as np

from calm_jax.cli.files import checked_json, open_regular, read_checked_json, write_atomically
from calm_jax.errors import UserError

# Rows that share a checksum, and are read together.
_BLOCK = 2**12
_LARGEST = 2**64 - 1


def _unreadable(path: pathlib.Path, reason: object) -> UserError:
    return UserError(
        f"{path} cannot be read ({reason}): delete {path.parent} and give the same command again"
    )


def _write(path: pathlib.Path, content: str | memoryview) -> None:
    write_atomically(path, content, f".{uuid.uuid4().hex}")


def write_value(path: pathlib.Path, value: object) -> None:
    """Writes a JSON value."""
    _write(path, checked_json(path.name, value))


def read_value(path: pathlib.Path) -> Any:
    """Reads what `write_value` wrote. Raises `UserError` if it is missing or damaged."""
    try:
        return read_checked_json(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _rows_of(index: pathlib.Path) -> pathlib.Path:
    return index.with_suffix(".rows")


def write_rows(index: pathlib.Path, rows_NC: np.ndarray) -> None:
    """Writes rows of integers that are not negative, sorted by their first column, for `read_rows`.

    Args:
        index: a path that ends with ".json". It appears once the rows are complete; these lie beside it, in ".rows".
        rows_NC: the rows, [N, C].
    """
    rows_NC = np.ascontiguousarray(rows_NC, "<u8")
    blocks = [rows_NC[begin : begin + _BLOCK] for begin in range(0, len(rows_NC), _BLOCK)]
    _write(_rows_of(index), rows_NC.data)
    value = {
        "shape": rows_NC.shape,
        "first": [int(block[0, 0]) for block in blocks],
        "crc32": [zlib.crc32(block.data) for block in blocks],
    }
    write_value(index, value)


def read_rows(index: pathlib.Path, lowest: int = 0, highest: int = _LARGEST) -> np.ndarray:
    """The rows of `write_rows` whose first column is in [lowest, highest], uint64 [N, C].

    Reads only the blocks that may hold such rows. Raises `UserError` if a file is missing or what is read is damaged.
    """
    about, path = read_value(index), _rows_of(index)
    num_rows, num_columns = about["shape"]
    # Rows that equal `lowest` may begin in the block before the first one that begins with it.
    begin = max(0, bisect.bisect_left(about["first"], lowest) - 1)
    end = max(begin, bisect.bisect_right(about["first"], highest))
    size = min(end * _BLOCK, num_rows) - begin * _BLOCK if end > begin else 0
    try:
        with open_regular(path) as file:
            file.seek(begin * _BLOCK * num_columns * 8)
            data = file.read(size * num_columns * 8)
        rows_NC = np.frombuffer(data, "<u8").reshape(size, num_columns)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    for block, crc32 in enumerate(about["crc32"][begin:end]):
        if zlib.crc32(rows_NC[block * _BLOCK : (block + 1) * _BLOCK].data) != crc32:
            raise _unreadable(path, f"the checksum of block {begin + block} is wrong")
    first_N = rows_NC[:, 0]
    return rows_NC[(first_N >= np.uint64(lowest)) & (first_N <= np.uint64(highest))]
