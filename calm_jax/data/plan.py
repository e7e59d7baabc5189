"""What preparing text comes to: which documents there are, which of them are copies, and where shards begin.

Every step reads and writes files of one folder (`work`), so that each can be done by any process of any machine that
sees it, and not again after an interruption. Documents are numbered in the order of the input; the pieces of a long one
count each for itself.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from calm_jax.atomic import write_atomically
from calm_jax.data.blocks import PUBLISHED_GROUP
from calm_jax.data.documents import Document, digest_of, read_file
from calm_jax.data.files import Place, is_seekable
from calm_jax.data.inputs import KEY, Input, Options
from calm_jax.errors import UserError

# Documents whose digests are held in memory at once.
_SEGMENT = 2**20
_PARTITION = 2**21
# Places in a shard's text that reading can begin at.
_MARKS = 16
# A document's number in its file, and above it the file's.
_FILE_SHIFT = 40
# Called now and then with the numbers of documents, characters and tokens since.
Report = Callable[[int, int, int], None]


def write_json(path: pathlib.Path, value: object) -> None:
    """Writes it whole or not at all; another process may write the same."""
    write_atomically(path, json.dumps(value, indent=1) + "\n", f".{uuid.uuid4().hex}")


def read_json(path: pathlib.Path) -> Any:
    """Raises `UserError` for a damaged file of ours."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): delete {path.parent} and give the same command again"
        ) from error


def _save(path: pathlib.Path, array: np.ndarray) -> None:
    """The same as `write_json` for an array."""
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(beside, "wb") as file:
            np.save(file, array)
        beside.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def scan_path(work: pathlib.Path, group: int) -> pathlib.Path:
    return work / f"scan-{group:05}.json"


def scan(work: pathlib.Path, inputs: Input, options: Options, report: Report, group: int) -> None:
    """Reads a group of files once: how many documents they have, where in them reading can begin, what is left out.

    With `deduplicate` also writes digests, sorted: digests-*.npy, uint64 [documents, 3].
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
    write_json(scan_path(work, group), found)


class _Digests:
    """Collects digests, and writes them in segments: rows of its two halves and the document's number, sorted."""

    def __init__(self, work: pathlib.Path, group: int):
        self._work, self._group = work, group
        self._rows: list[bytes] = []
        self._num_segments = 0

    def add(self, document: Document, number: int) -> None:
        self._rows.append(digest_of(document) + number.to_bytes(8, "big"))
        if len(self._rows) == _SEGMENT:
            self.flush()

    def flush(self) -> None:
        rows_N3 = np.frombuffer(b"".join(self._rows), ">u8").reshape(-1, 3).astype(np.uint64)
        rows_N3 = rows_N3[np.argsort(rows_N3[:, 0], kind="stable")]
        name = f"digests-{self._group:05}-{self._num_segments:05}.npy"
        _save(self._work / name, rows_N3)
        self._rows, self._num_segments = [], self._num_segments + 1


def copies_path(work: pathlib.Path, part: int) -> pathlib.Path:
    return work / f"copies-{part:05}.npy"


def find_copies(work: pathlib.Path, num_parts: int, part: int) -> None:
    """Of the documents in one part of all digests, writes the numbers of those that have an equal one before them."""
    lowest, highest = (2**64 * part // num_parts, 2**64 * (part + 1) // num_parts - 1)
    rows = []
    for path in sorted(work.glob("digests-*.npy")):
        segment_N3 = np.load(path, mmap_mode="r")
        begin = np.searchsorted(segment_N3[:, 0], np.uint64(lowest), side="left")
        end = np.searchsorted(segment_N3[:, 0], np.uint64(highest), side="right")
        rows.append(np.asarray(segment_N3[begin:end]))
    rows_N3 = np.concatenate(rows)
    rows_N3 = rows_N3[np.lexsort((rows_N3[:, 2], rows_N3[:, 1], rows_N3[:, 0]))]
    is_copy = np.zeros(len(rows_N3), bool)
    is_copy[1:] = (rows_N3[1:, :2] == rows_N3[:-1, :2]).all(1)
    _save(copies_path(work, part), rows_N3[is_copy, 2])


def num_parts(num_documents: int) -> int:
    """Parts of the digests, each small enough for the memory of one process."""
    return -(-num_documents // _PARTITION) or 1


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where everything is.

    files: what `scan` found. bounds: number of the first document of each shard, and after the last the number of all.
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
        """Number of each file's first document, and after the last the number of all."""
        return np.cumsum([0, *(file["documents"] for file in self.files)])

    def copies(self, first: int, stop: int) -> set[int]:
        """Those of the documents from `first` to `stop` that are to be left out."""
        copies_N = np.load(self.work / "copies.npy", mmap_mode="r")
        begin, end = np.searchsorted(copies_N, [first, stop])
        return set(copies_N[begin:end].tolist())

    def num_kept(self, shard: int) -> int:
        """Documents of a shard that are not copies."""
        first, stop = self.bounds[shard], self.bounds[shard + 1]
        return stop - first - len(self.copies(first, stop))

    def can_begin_at(self, document: int) -> bool:
        """Whether reading can begin there without reading all of the file before it."""
        file = self._file_of(document)
        return is_seekable(self.inputs.files[file]) or document == self.first_document[file]

    def _file_of(self, document: int) -> int:
        # The last of those that begin there: others are empty.
        return int(np.searchsorted(self.first_document, document, side="right")) - 1

    def documents(self, first: int, stop: int, options: Options) -> Iterator[tuple[int, Document]]:
        """The documents from `first` to `stop`, with their numbers."""
        # Counted by `scan`.
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
                # A compressed file may end early without a change of its size.
                raise UserError(
                    f"{KEY}: {self.inputs.files[file]} has fewer documents than when this was begun"
                )
            self.inputs.check(file)
            file += 1
            first = max(first, int(self.first_document[file]))

    def save(self) -> None:
        write_json(
            self.work / "layout.json",
            {"input": dataclasses.asdict(self.inputs), "files": self.files, "bounds": self.bounds},
        )

    @classmethod
    def load(cls, work: pathlib.Path) -> "Layout":
        stored = read_json(work / "layout.json")
        inputs = Input(tuple(stored["input"]["files"]), tuple(stored["input"]["states"]))
        return cls(work, inputs, stored["files"], stored["bounds"])


def merge_copies(work: pathlib.Path, first_document: np.ndarray, parts: int) -> np.ndarray:
    """The numbers of all copies, sorted, of all parts that were looked at; 8 bytes of memory for each."""
    keys = [np.load(copies_path(work, part)) for part in range(parts)]
    keys_N = np.concatenate([np.zeros(0, np.uint64), *keys])
    inside = np.uint64((1 << _FILE_SHIFT) - 1)
    file_N, inside_N = keys_N >> np.uint64(_FILE_SHIFT), keys_N & inside
    copies_N = np.sort(first_document[file_N.astype(np.int64)] + inside_N.astype(np.int64))
    _save(work / "copies.npy", copies_N)
    return copies_N


def shard_bounds(files: Sequence[dict], options: Options, copies_N: np.ndarray) -> list[int]:
    """Numbers of the shards' first documents, and the number of all documents.

    A shard ends at the first mark with enough text before it; with the published packing at the next whole group of those
    documents that stay.
    """
    total = sum(file["documents"] for file in files)
    # A document that stays has so many copies before it, by how many that stay are before it.
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
