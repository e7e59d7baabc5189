"""The first pass of a preparation: counts the documents of the input, finds copies, and decides where shards begin.

Every step reads and writes files of one folder (`work`). Any process on any machine that shares the folder can run a step,
and a finished step is not repeated after an interruption. Documents are numbered in the order of the input; every piece
of a long text counts as a document.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from calm_jax.cli import files
from calm_jax.cli.files import os_errors, write_atomically
from calm_jax.data.documents import Document, digest_of, read_file
from calm_jax.data.files import Place, is_seekable
from calm_jax.data.packing import PUBLISHED_GROUP
from calm_jax.data.prepare.options import KEY, Input, Options
from calm_jax.errors import UserError, reason_of

# Digests that are collected in memory before they are written to a file.
_SEGMENT = 2**20
# The average number of digests in a part, which is held in memory to find the copies in it.
_PARTITION = 2**21
# Marks (places where reading can begin) in the text of one shard.
_MARKS = 16
# A document's key has its number within its file in the low 40 bits, and the file's number above them.
_FILE_SHIFT = 40
# Called from time to time with the numbers of documents, characters and tokens since the last call.
Report = Callable[[int, int, int], None]


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes a file atomically; several processes may write the same file."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", f".{uuid.uuid4().hex}")


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write_checked(path: pathlib.Path, content: object) -> None:
    """Writes a JSON value with its checksum, for `read_checked`."""
    write_json(path, {"sha256": _digest(content), "content": content})


def _unreadable(path: pathlib.Path, reason: object) -> UserError:
    return UserError(
        f"{path} cannot be read ({reason}): delete {path.parent} and give the same command again"
    )


def read_checked(path: pathlib.Path) -> Any:
    """Reads what `_write_checked` wrote. Raises `UserError` if it is missing or damaged."""
    try:
        stored = files.read_json(path)
        if stored["sha256"] != _digest(stored["content"]):
            raise ValueError("its checksum is wrong")
        return stored["content"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    """Writes an array atomically; several processes may write the same file."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with os_errors(path, "written"):
        with open(beside, "wb") as file:
            np.save(file, array)
        # Else a power cut could leave an empty file under the final name.
        files.sync(beside)
        beside.rename(path)


def _load(path: pathlib.Path, dtype: type, *columns: int) -> np.ndarray:
    """A memory map of an array that `_save` wrote. Raises `UserError` if it is missing, or no array of this type and shape.

    The numbers are not checked: to find copies, each worker reads a small part of all files.
    """
    try:
        with files.open_regular(path):
            array = np.load(path, mmap_mode="r")
        is_expected = array.dtype == dtype and array.ndim >= 1 and array.shape[1:] == columns
    # numpy raises exceptions of many types for a damaged header.
    except Exception as error:
        raise _unreadable(path, reason_of(error) or type(error).__name__) from error
    if not is_expected:
        raise _unreadable(path, "it has another shape or type than this program writes")
    return array


def scan_path(work: pathlib.Path, group: int) -> pathlib.Path:
    """The file with the results of `scan` for a group of input files."""
    return work / f"scan-{group:05}.json"


def scan(work: pathlib.Path, inputs: Input, options: Options, report: Report, group: int) -> None:
    """Reads a group of files once, and writes the counts and marks of each to `scan_path`.

    A mark is a place where reading can begin: `(documents, characters, records, bytes)` of the file before it. With
    `deduplicate` also writes the digests of all documents, for `find_copies`.

    Args:
        work: the folder of intermediate files.
        inputs: all input files.
        options: how they are processed.
        report: called with the progress, see `Report`.
        group: the index in `inputs.groups()` of the files to read.
    """
    first, stop = inputs.groups()[group]
    digests = _Digests(work, group) if options.deduplicate else None
    found = []
    for number in range(first, stop):
        inputs.check(number)
        left_out: collections.Counter = collections.Counter()
        documents = characters = marked = 0
        marks: list[tuple[int, int, int, int]] = []
        reported = documents, characters
        for place, pieces in read_file(
            inputs.files[number], KEY, options.reading, left_out, Place(0, 0)
        ):
            if not marks or characters - marked >= options.shard_characters // _MARKS:
                marks.append((documents, characters, place.number, place.offset))
                marked = characters
                report(documents - reported[0], characters - reported[1], 0)
                reported = documents, characters
            for piece in pieces:
                if digests is not None:
                    digests.add(piece, (number << _FILE_SHIFT) + documents)
                documents += 1
                characters += len(piece.text)
        report(documents - reported[0], characters - reported[1], 0)
        found.append(
            {
                "documents": documents,
                "characters": characters,
                "marks": marks,
                "left_out": dict(left_out),
            }
        )
    if digests is not None:
        digests.flush()
    _write_checked(scan_path(work, group), found)


class _Digests:
    """Collects documents' digests, and writes them in segments: digests-*.npy, uint64 [documents, 3].

    A row is both halves of the digest and the document's key. Rows are sorted by the first half.
    """

    def __init__(self, work: pathlib.Path, group: int):
        self._work, self._group = work, group
        self._rows: list[bytes] = []
        self._num_segments = 0

    def add(self, document: Document, key: int) -> None:
        self._rows.append(digest_of(document) + key.to_bytes(8, "big"))
        if len(self._rows) == _SEGMENT:
            self.flush()

    def flush(self) -> None:
        rows_N3 = np.frombuffer(b"".join(self._rows), ">u8").reshape(-1, 3).astype(np.uint64)
        rows_N3 = rows_N3[np.argsort(rows_N3[:, 0], kind="stable")]
        name = f"digests-{self._group:05}-{self._num_segments:05}.npy"
        _save(self._work / name, rows_N3)
        self._rows, self._num_segments = [], self._num_segments + 1


def copies_path(work: pathlib.Path, part: int) -> pathlib.Path:
    """The file with the results of `find_copies` for a part of the digests."""
    return work / f"copies-{part:05}.npy"


def find_copies(work: pathlib.Path, num_parts: int, part: int) -> None:
    """Writes the keys of the documents that equal an earlier one, for one of `num_parts` equal ranges of digests."""
    lowest, highest = (2**64 * part // num_parts, 2**64 * (part + 1) // num_parts - 1)
    rows = []
    for path in sorted(work.glob("digests-*.npy")):
        segment_N3 = _load(path, np.uint64, 3)
        begin = np.searchsorted(segment_N3[:, 0], np.uint64(lowest), side="left")
        end = np.searchsorted(segment_N3[:, 0], np.uint64(highest), side="right")
        rows.append(np.asarray(segment_N3[begin:end]))
    rows_N3 = np.concatenate(rows)
    rows_N3 = rows_N3[np.lexsort((rows_N3[:, 2], rows_N3[:, 1], rows_N3[:, 0]))]
    is_copy = np.zeros(len(rows_N3), bool)
    is_copy[1:] = (rows_N3[1:, :2] == rows_N3[:-1, :2]).all(1)
    _save(copies_path(work, part), rows_N3[is_copy, 2])


def num_parts(num_documents: int) -> int:
    """The number of parts of the digests, each small enough for the memory of one process."""
    return -(-num_documents // _PARTITION) or 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the documents lie in the input files, and where shards begin.

    Attributes:
        work: the folder of intermediate files.
        inputs: the input files.
        files: the results of `scan` for each input file.
        bounds: the number of each shard's first document, and last the number of all documents.
    """

    work: pathlib.Path
    inputs: Input
    files: list[dict]
    bounds: list[int]

    @property
    def num_shards(self) -> int:
        return len(self.bounds) - 1

    @functools.cached_property
    def first_document(self) -> np.ndarray:
        """The number of each file's first document, and last the number of all documents."""
        return np.cumsum([0, *(file["documents"] for file in self.files)])

    def copies(self, first: int, stop: int) -> set[int]:
        """The numbers of the copies, which are left out, among the documents from `first` to `stop` (exclusive)."""
        copies_N = _load(self.work / "copies.npy", np.int64)
        begin, end = np.searchsorted(copies_N, [first, stop])
        return set(copies_N[begin:end].tolist())

    def num_kept(self, shard: int) -> int:
        """The number of documents of a shard that are not copies."""
        first, stop = self.bounds[shard], self.bounds[shard + 1]
        return stop - first - len(self.copies(first, stop))

    def can_begin_at(self, document: int) -> bool:
        """Whether reading can begin at a document without decompressing the file before it."""
        file = self._file_of(document)
        return is_seekable(self.inputs.files[file]) or document == self.first_document[file]

    def _file_of(self, document: int) -> int:
        # If several files have the same first document, all but the last of them are empty.
        return int(np.searchsorted(self.first_document, document, side="right")) - 1

    def documents(self, first: int, stop: int, options: Options) -> Iterator[tuple[int, Document]]:
        """The documents from `first` to `stop` (exclusive), copies included, with their numbers.

        Raises `UserError` if an input file has changed since it was scanned.
        """
        # `read_file` counts into it. The count is not used, because `scan` has counted these records.
        left_out: collections.Counter = collections.Counter()
        file = self._file_of(first)
        while first < stop:
            self.inputs.check(file)
            base = int(self.first_document[file])
            marks = [mark for mark in self.files[file]["marks"] if mark[0] <= first - base]
            number = base
            if marks:
                inside, _, record, offset = marks[-1]
                number, place = base + inside, Place(record, offset)
                name = self.inputs.files[file]
                for _, pieces in read_file(name, KEY, options.reading, left_out, place):
                    for piece in pieces:
                        if first <= number < stop:
                            yield number, piece
                        number += 1
                    if number >= stop:
                        break
            if number < min(stop, int(self.first_document[file + 1])):
                # A change in the middle of a file, which its signature does not cover, may remove documents.
                raise UserError(
                    f"{KEY}: {self.inputs.files[file]} has fewer documents than when it was scanned"
                )
            self.inputs.check(file)
            file += 1
            first = max(first, int(self.first_document[file]))

    def save(self) -> None:
        """Writes the layout to `work`, for `load`."""
        _write_checked(
            self.work / "layout.json",
            {"input": dataclasses.asdict(self.inputs), "files": self.files, "bounds": self.bounds},
        )

    @classmethod
    def load(cls, work: pathlib.Path) -> "Layout":
        stored = read_checked(work / "layout.json")
        inputs = Input(tuple(stored["input"]["files"]), tuple(stored["input"]["states"]))
        return cls(work, inputs, stored["files"], stored["bounds"])


def merge_copies(work: pathlib.Path, first_document: np.ndarray, parts: int) -> np.ndarray:
    """Writes and returns the numbers of all copies, sorted; takes 8 bytes of memory for each.

    Args:
        work: the folder with the results of `find_copies`.
        first_document: the number of each file's first document.
        parts: the number of parts of the digests; 0 without `deduplicate`.
    """
    keys = [_load(copies_path(work, part), np.uint64) for part in range(parts)]
    keys_N = np.concatenate([np.zeros(0, np.uint64), *keys])
    inside = np.uint64((1 << _FILE_SHIFT) - 1)
    file_N = (keys_N >> np.uint64(_FILE_SHIFT)).astype(np.int64)
    inside_N = (keys_N & inside).astype(np.int64)
    if len(keys_N) and file_N.max() >= len(first_document) - 1:
        raise _unreadable(work / "digests-*.npy", "a key names a file that there is not")
    copies_N = np.sort(first_document[file_N] + inside_N)
    _save(work / "copies.npy", copies_N)
    return copies_N


def shard_bounds(files: Sequence[dict], options: Options, copies_N: np.ndarray) -> list[int]:
    """The number of each shard's first document, and last the number of all documents.

    A shard ends at the first mark after `shard_characters` of text. With the published packing it ends at the end of a
    group (`PUBLISHED_GROUP` documents, copies not counted), so that shards can be packed independently.

    Args:
        files: the results of `scan` for each file.
        options: the size of shards and the packing.
        copies_N: the numbers of the copies, sorted.
    """
    total = sum(file["documents"] for file in files)
    # For each copy the number of documents before it that are no copies.
    before_N = copies_N - np.arange(len(copies_N))
    bounds, document, characters, since = [0], 0, 0, 0
    for file in files:
        for mark in file["marks"]:
            bound = document + mark[0]
            if characters + mark[1] - since < options.shard_characters or bound <= bounds[-1]:
                continue
            if options.packing == "published":
                kept = bound - int(np.searchsorted(copies_N, bound))
                kept += -kept % PUBLISHED_GROUP
                bound = kept + int(np.searchsorted(before_N, kept, side="right"))
            if bound >= total:
                break
            bounds.append(bound)
            since = characters + mark[1]
        document += file["documents"]
        characters += file["characters"]
    return [*bounds, total]
