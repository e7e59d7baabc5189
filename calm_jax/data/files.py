"""Finds, opens and decompresses files of records, and splits them into lines.

Names with "://" in them are remote files, read with fsspec; all others are local.
"""

import contextlib
import dataclasses
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from calm_jax.errors import UserError, installation, typed_reason_of

_FORMATS = (".txt", ".jsonl", ".json", ".parquet")
COMPRESSIONS = (".gz", ".zst")
# Longest record in bytes; a longer one is a bad record, so that it cannot fill the memory.
MOST_BYTES = 2**28
# Bytes read at once.
_PIECE = 2**20
# Compressed bytes that are decompressed at once; decompressed, they may be tens of thousands of times as many.
_PACKED_PIECE = 2**12
# Largest window of a zstd frame that is decompressed, in bytes of memory; `zstd --long=31` makes such windows.
_MOST_WINDOW = 2**31


class BadRecord(Exception):
    """A record that cannot be read; a caller either reports it or counts it and goes on.

    Attributes:
        reason: a few words, the same for all records with this fault; the key under which they are counted.
        detail: what is wrong with this record, for an error message.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a record of a file begins.

    Attributes:
        number: records before it, bad ones included.
        offset: decompressed bytes before it; for .parquet, rows before it.
    """

    number: int
    offset: int


START = Place(0, 0)


def find_files(globs: str, key: str) -> list[str]:
    """The files that match comma-separated globs, sorted within each glob, without repetitions.

    Args:
        globs: local globs and remote ones ("://").
        key: the config key or flag that holds `globs`, for messages.

    Raises:
        UserError: a glob matches nothing or a folder, cannot be listed, or a file's format is unknown.
    """
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
        # A pipe can be read only once, and a device may never end.
        if "://" not in file and not os.path.isfile(file):
            raise UserError(f"{key}: {file} is no file")
        if format_of(file) is None:
            raise UserError(
                f"{key}: {file} has an unknown format; known are {', '.join(_FORMATS[:-1])} (each also as .gz or .zst) and {_FORMATS[-1]}"
            )
    return list(dict.fromkeys(files))


def _local_files(pattern: str) -> list[str]:
    # A name with brackets may be a file's own name, not a glob.
    if os.path.exists(pattern):
        return [pattern]
    return sorted(glob.glob(pattern, recursive=True))


def _remote_files(pattern: str, key: str) -> list[str]:
    fsspec = library("fsspec", pattern)
    try:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        return sorted(filesystem.unstrip_protocol(name) for name in filesystem.glob(path))
    # Each remote file system's library raises exceptions of its own.
    except Exception as error:
        raise UserError(
            f"{key}: {pattern!r} cannot be listed ({typed_reason_of(error)})"
        ) from error


def format_of(file: str) -> str | None:
    """The suffix of a file's format, without that of its compression; None for a format that is not supported."""
    name, is_packed = file, False
    for suffix in COMPRESSIONS:
        if file.endswith(suffix):
            name, is_packed = file.removesuffix(suffix), True
    found = next((suffix for suffix in _FORMATS if name.endswith(suffix)), None)
    return None if is_packed and found == ".parquet" else found


def library(name: str, file: str) -> Any:
    """Imports a library of the extra `data`. Raises `UserError`, naming the `file` that needs it, if it is not installed."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{file}: reading it needs {name}: {installation('data')}") from error


class _Unzstd(io.RawIOBase):
    """The decompressed bytes of a .zst file.

    zstandard's own `stream_reader`, which fsspec uses, would read a truncated file, which ends within a frame, without an
    error.
    """

    def __init__(self, packed: BinaryIO, file: str):
        self._parts = _unzstd_parts(packed, library("zstandard", file))
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._ready = memoryview(part)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _unzstd_parts(packed: BinaryIO, zstandard: Any) -> Iterator[bytes]:
    """Decompresses any number of frames. At the end raises `BadRecord` if the last frame is incomplete."""
    frame = None
    while piece := packed.read(_PACKED_PIECE):
        while piece:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj()
            yield frame.decompress(piece)
            piece = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise BadRecord("truncated file", "the file ends within a zstd frame")


@contextlib.contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """Opens a file for reading its decompressed bytes. Raises `BadRecord` where compressed bytes are damaged."""
    opener = library("fsspec", file).open if "://" in file else open
    damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if file.endswith(".zst"):
        damaged += (library("zstandard", file).ZstdError,)
    with opener(file, "rb") as packed:
        try:
            if file.endswith(".gz"):
                with gzip.GzipFile(fileobj=packed) as unpacked:
                    yield cast(BinaryIO, unpacked)
            elif file.endswith(".zst"):
                yield io.BufferedReader(_Unzstd(packed, file), _PIECE)
            else:
                yield packed
        except damaged as error:
            raise BadRecord("damaged file", f"the compressed data is damaged ({error})") from error


def _lines(file: BinaryIO, start: Place) -> Iterator[tuple[Place, bytes | BadRecord]]:
    """The lines from the file's current position on, which is `start`; a `BadRecord` in place of a line that is too long."""
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
    """The lines of a newly opened file from `start` on, each with its place.

    A line of more than `MOST_BYTES` is skipped, and a `BadRecord` stands in its place.

    Args:
        name: the file's name, which tells whether it is compressed.
        file: the result of `opened(name)`.
        start: the place of the first line to return.
    """
    if is_seekable(name):
        file.seek(start.offset)
        yield from _lines(file, start)
        return
    # A compressed file is always read from its beginning: damage is then found at the same line, whatever `start` is.
    for place, line in _lines(file, START):
        if place.number >= start.number:
            yield place, line


def too_long(what: str, way_out: str = "") -> BadRecord:
    """The bad record for a "line" or "text" of more than `MOST_BYTES`. way_out: what to do about it, after a colon."""
    return BadRecord(f"long {what}", f"the {what} is longer than {MOST_BYTES >> 20} MiB{way_out}")


def is_seekable(file: str) -> bool:
    """Whether reading can begin at a place in the file without decompressing everything before it."""
    return format_of(file) == ".parquet" or not file.endswith(COMPRESSIONS)


def state(file: str) -> tuple[int, int] | None:
    """Size in bytes and time of the last change in ns, which show that a local file was written to; None for a remote one."""
    if "://" in file:
        return None
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns
