"""Documents from text files, one after the other: .txt, .jsonl, .json and .parquet, and .gz or .zst of the first three.

Files are read as streams, never whole (but for a .txt, which is one document). A bad record is either an error
that names file and line, or counted and left out. Names with "://" in them are read with fsspec.
"""

import collections
import contextlib
import dataclasses
import glob
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from calm_jax.errors import UserError

_FORMATS = (".txt", ".jsonl", ".json", ".parquet")
_COMPRESSIONS = (".gz", ".zst")
# No document is longer; a line that is would fill the memory.
_MOST_LINE_BYTES = 2**28
_PIECE = 2**20


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of a record's fields; an empty `prompt` means that records have none."""

    text: str
    prompt: str


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and the name that decides whether it is held out.

    prompt: what the text follows, to be read and not learnt.
    """

    name: str
    text: str
    prompt: str = ""


class _BadRecord(Exception):
    """`reason` is for counting, `detail` for the person who has to find the record."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def find_files(globs: str, key: str) -> list[str]:
    """The files that comma-separated globs match, in order and once. Raises `UserError` for a glob without a match."""
    files: list[str] = []
    for pattern in map(str.strip, globs.split(",")):
        matches = _remote_files(pattern, key) if "://" in pattern else _local_files(pattern)
        if not matches:
            raise UserError(f"{key}: no file matches {pattern!r}")
        files += matches
    for file in files:
        if _format(file) is None:
            raise UserError(
                f"{key}: {file} is none of {', '.join(_FORMATS)}, nor .gz or .zst of the first three"
            )
    return list(dict.fromkeys(files))


def _local_files(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))


def _remote_files(pattern: str, key: str) -> list[str]:
    fsspec = _library("fsspec", pattern)
    try:
        filesystem, path = fsspec.core.url_to_fs(pattern)
        return sorted(filesystem.unstrip_protocol(name) for name in filesystem.glob(path))
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"{key}: {pattern!r} cannot be listed ({error})") from error


def _format(file: str) -> str | None:
    """The suffix that says how to read a file, without that of a compression; None for one that nobody can."""
    name, is_packed = file, False
    for suffix in _COMPRESSIONS:
        if file.endswith(suffix):
            name, is_packed = file.removesuffix(suffix), True
    found = next((suffix for suffix in _FORMATS if name.endswith(suffix)), None)
    return None if is_packed and found == ".parquet" else found


def _library(name: str, file: str) -> Any:
    """A library of the extra `data`. Raises `UserError` if it is not there."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"{file}: reading it needs {name}: pip install 'calm_jax[data]'") from error


class _Unzstd(io.RawIOBase):
    """The bytes of a .zst, of any number of frames; a file that ends within one is a `_BadRecord`."""

    def __init__(self, packed: BinaryIO, file: str):
        self._library = _library("zstandard", file)
        self._packed, self._ready = packed, b""
        self._frame = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            packed = self._packed.read(_PIECE)
            if not packed:
                if self._frame is not None:
                    raise _BadRecord("truncated file", "the file ends within a zstd frame")
                return 0
            self._unpack(packed)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self, packed: bytes) -> None:
        parts = []
        while packed:
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            parts.append(self._frame.decompress(packed))
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        self._ready = b"".join(parts)


@contextlib.contextmanager
def _opened(file: str) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file. Raises `_BadRecord` where packed ones make no sense."""
    opener = _library("fsspec", file).open if "://" in file else open
    damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if file.endswith(".zst"):
        damaged += (_library("zstandard", file).ZstdError,)
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
            raise _BadRecord("damaged file", f"the packed bytes are damaged ({error})") from error


def _lines(file: BinaryIO) -> Iterator[bytes | _BadRecord]:
    """Lines; of one that is too long nothing but that it was there."""
    while line := file.readline(_MOST_LINE_BYTES):
        if len(line) < _MOST_LINE_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_PIECE)
        yield _BadRecord("long line", f"the line is longer than {_MOST_LINE_BYTES >> 20} MiB")


def _field(record: Any, name: str) -> str:
    if not isinstance(record, dict) or name not in record:
        raise _BadRecord("missing field", f"no field {name!r}")
    text = record[name]
    if not isinstance(text, str):
        raise _BadRecord("not text", f"field {name!r} is {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRecord("lone surrogate", f"field {name!r} has a lone surrogate") from error
    return text


def _document(record: Any, name: str, fields: Fields) -> Document:
    text = _field(record, fields.text)
    return Document(name, text, _field(record, fields.prompt) if fields.prompt else "")


def _parse(line: bytes, name: str, fields: Fields) -> Document:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRecord("invalid UTF-8", f"byte {error.start} is not valid UTF-8") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise _BadRecord("malformed JSON", f"not valid JSON ({error})") from error
    return _document(record, name, fields)


# Where a bad record is, and what is wrong with it.
_Bad = tuple[str, _BadRecord]


def _read_text(file: str, name: str) -> Iterator[Document | _Bad]:
    with _opened(file) as source:
        text = source.read()
    try:
        # Not as a text file, which would make "\n" of every line end.
        yield Document(name, text.decode("utf-8"))
    except UnicodeDecodeError as error:
        yield file, _BadRecord("invalid UTF-8", f"byte {error.start} is not valid UTF-8")


def _read_lines(file: str, name: str, fields: Fields) -> Iterator[Document | _Bad]:
    with _opened(file) as source:
        for number, line in enumerate(_lines(source), 1):
            try:
                if isinstance(line, _BadRecord):
                    raise line
                if line.strip():
                    yield _parse(line, f"{name}:{number}", fields)
            except _BadRecord as bad:
                yield f"{file}, line {number}", bad


def _read_parquet(file: str, name: str, fields: Fields) -> Iterator[Document | _Bad]:
    _library("pyarrow", file)
    import pyarrow
    import pyarrow.parquet

    number = 0
    with _opened(file) as source:
        try:
            table = pyarrow.parquet.ParquetFile(source)
            asked = [column for column in (fields.text, fields.prompt) if column]
            there = [column for column in asked if column in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=256, columns=there):
                for record in batch.to_pylist():
                    number += 1
                    try:
                        yield _document(record, f"{name}:{number}", fields)
                    except _BadRecord as bad:
                        yield f"{file}, row {number}", bad
        except pyarrow.ArrowException as error:
            raise _BadRecord("damaged file", f"no whole Parquet file ({error})") from error


def _read_file(file: str, fields: Fields) -> Iterator[Document | _Bad]:
    # Compressed or not, a document has the same name.
    name = pathlib.PurePosixPath(file).name
    for suffix in _COMPRESSIONS:
        name = name.removesuffix(suffix)
    try:
        if _format(file) == ".txt":
            yield from _read_text(file, name)
        elif _format(file) == ".parquet":
            yield from _read_parquet(file, name, fields)
        else:
            yield from _read_lines(file, name, fields)
    except _BadRecord as bad:
        yield file, bad


def _state(file: str) -> tuple[int, int] | None:
    """What changes when somebody writes to a local file."""
    if "://" in file:
        return None
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def read_documents(
    files: Iterable[str],
    key: str,
    fields: Fields,
    on_bad_record: str,
    skipped: collections.Counter,
) -> Iterator[Document]:
    """The documents of files, in order, without empty ones.

    on_bad_record: "raise" makes a `UserError` of the first bad record, "skip" counts it in `skipped` by what is wrong
    with it. Of a damaged file what comes before the damage is kept.
    """
    for file in files:
        if fields.prompt and _format(file) == ".txt":
            raise UserError(
                f"{key}: {file} has no field {fields.prompt!r} (data.prompt_field): give .jsonl or .json"
            )
        try:
            before = _state(file)
            for item in _read_file(file, fields):
                if isinstance(item, Document):
                    # After a prompt nothing at all is an answer, too.
                    if item.text or fields.prompt:
                        yield item
                    continue
                where, bad = item
                if on_bad_record == "raise":
                    raise UserError(
                        f"{where}: {bad.detail}; mend it, or leave such records out with "
                        "--config.data.on_bad_record=skip"
                    )
                skipped[bad.reason] += 1
            if _state(file) != before:
                raise UserError(f"{key}: {file} was changed while it was read: try again")
        except OSError as error:
            raise UserError(f"{key}: {file} cannot be read: {error.strerror or error}") from error
