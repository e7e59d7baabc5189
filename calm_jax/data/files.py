"""Files of records: finding them, unpacking them, and the lines in them; local, or with "://" in their names by fsspec."""

import contextlib
import dataclasses
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from calm_jax.errors import UserError

_FORMATS = (".txt", ".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
# No record is longer; one that is would fill the memory.
MOST_BYTES = 2**28
_PIECE = 2**20
# Unpacked, it may be tens of thousands of times as large.
_PACKED_PIECE = 2**12
# What zstd --long may ask for at most, in bytes of memory.
_MOST_WINDOW = 2**31


class BadRecord(Exception):
    """`reason` is for counting, `detail` for the person who has to find the record."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a record of a file begins: records before it (also bad ones), and bytes, unpacked, or rows before it."""

    number: int
    offset: int


START = Place(0, 0)


def find_files(globs: str, key: str) -> list[str]:
    """The files that comma-separated globs match, in order and once. Raises `UserError` for a glob without a match."""
    files: list[str] = []
    patterns = [pattern for pattern in map(str.strip, globs.split(",")) if pattern]
    if not patterns:
        raise UserError(f"{key}={globs!r} names no file")
    for pattern in patterns:
        matches = _remote_files(pattern, key) if "://" in pattern else _local_files(pattern)
        if not matches:
            raise UserError(f"{key}: no file matches {pattern!r}")
        files += matches
    for file in files:
        if "://" not in file and os.path.isdir(file):
            raise UserError(
                f"{key}: {file} is a folder: name the files in it, as in {file}/*.jsonl"
            )
        if format_of(file) is None:
            raise UserError(
                f"{key}: {file} is none of {', '.join(_FORMATS)}, nor .gz or .zst of the first three"
            )
    return list(dict.fromkeys(files))


def _local_files(pattern: str) -> list[str]:
    # A name may have brackets in it.
    if os.path.exists(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def _remote_files(pattern: str, key: str) -> list[str]:
    fsspec = library("fsspec", pattern)
    try:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        return sorted(filesystem.unstrip_protocol(name) for name in filesystem.glob(path))
    # Errors of a network are those of whichever library reads it.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{key}: {pattern!r} cannot be listed ({type(error).__name__}: {reason})"
        ) from error


def format_of(file: str) -> str | None:
    """The suffix that says how to read a file, without that of a compression; None for one that nobody can."""
    name, is_packed = file, False
    for suffix in COMPRESSIONS:
        if file.endswith(suffix):
            name, is_packed = file.removesuffix(suffix), True
    found = next((suffix for suffix in _FORMATS if name.endswith(suffix)), None)
    return None if is_packed and found == ".parquet" else found


def library(name: str, file: str) -> Any:
    """A library of the extra `data`. Raises `UserError` if it is not there."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{file}: reading it needs {name}: pip install 'calm_jax[data]'") from error


class _Unzstd(io.RawIOBase):
    """The bytes of a .zst, of any number of frames; a file that ends within one is a `BadRecord`."""

    def __init__(self, packed: BinaryIO, file: str):
        self._library = library("zstandard", file)
        self._packed, self._ready = packed, memoryview(b"")
        self._frame = None
        self._damage: Exception | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            if self._damage is not None:
                raise self._damage
            packed = self._packed.read(_PACKED_PIECE)
            if not packed:
                if self._frame is not None:
                    raise BadRecord("truncated file", "the file ends within a zstd frame")
                return 0
            self._unpack(packed)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self, packed: bytes) -> None:
        parts = []
        try:
            while packed:
                if self._frame is None:
                    self._frame = self._library.ZstdDecompressor(
                        max_window_size=_MOST_WINDOW
                    ).decompressobj()
                parts.append(self._frame.decompress(packed))
                packed = self._frame.unused_data if self._frame.eof else b""
                if self._frame.eof:
                    self._frame = None
        except self._library.ZstdError as error:
            # After what came before it.
            self._damage = error
        self._ready = memoryview(b"".join(parts))


@contextlib.contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file. Raises `BadRecord` where packed ones make no sense."""
    opener = library("fsspec", file).open if "://" in file else open
    damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if file.endswith(".zst"):
        damaged += (library("zstandard", file).ZstdError,)
    with opener(file, "rb") as packed:
        try:
            if file.endswith(".gz"):
                with gzip.GzipFile(fileobj=packed) as unpacked:
                    yield unpacked
            elif file.endswith(".zst"):
                yield io.BufferedReader(_Unzstd(packed, file), _PIECE)
            else:
                yield packed
        except damaged as error:
            raise BadRecord("damaged file", f"the packed bytes are damaged ({error})") from error


def lines(file: BinaryIO, start: Place) -> Iterator[tuple[Place, bytes | BadRecord]]:
    """Lines, from `start` on, which has to be where the file stands; of one that is too long nothing but that it was there."""
    number, offset = start.number, start.offset
    while line := file.readline(MOST_BYTES):
        place, size = Place(number, offset), len(line)
        if size < MOST_BYTES or line.endswith(b"\n"):
            yield place, line
        else:
            while line and not line.endswith(b"\n"):
                line = file.readline(_PIECE)
                size += len(line)
            yield place, too_long("line")
        number, offset = number + 1, offset + size


def lines_from(
    name: str, file: BinaryIO, start: Place
) -> Iterator[tuple[Place, bytes | BadRecord]]:
    """The lines of an opened file from `start` on, wherever it stands."""
    if is_seekable(name):
        file.seek(start.offset)
        yield from lines(file, start)
        return
    # Read as it is from the beginning, so that damage, if there is any, is met at the same line.
    for place, line in lines(file, START):
        if place.number >= start.number:
            yield place, line


def too_long(what: str) -> BadRecord:
    return BadRecord(f"long {what}", f"the {what} is longer than {MOST_BYTES >> 20} MiB")


def is_seekable(file: str) -> bool:
    """Whether reading from a place in the middle does not mean reading all before it."""
    return format_of(file) == ".parquet" or not file.endswith(COMPRESSIONS)


def state(file: str) -> tuple[int, int] | None:
    """What changes when somebody writes to a local file: size in bytes, time in ns; None for a remote one."""
    if "://" in file:
        return None
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
