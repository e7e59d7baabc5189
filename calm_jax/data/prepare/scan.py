"""The first pass of a preparation: counts the documents of the input, finds copies, and decides where shards begin.

Every step reads and writes files of one folder (`work`), see `work_files`. Any process on any machine that shares the folder can run a step,
and a finished step is not repeated after an interruption. Documents are numbered in the order of the input; every piece
of a long text counts as a document.
"""

import collections
import dataclasses
import functools
import itertools
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from calm_jax.data.documents import Document, digest_of, read_file
from calm_jax.data.files import Place, is_seekable, state
from calm_jax.data.packing import PUBLISHED_GROUP
from calm_jax.data.prepare.options import KEY, Input, Options, changed
from calm_jax.data.prepare.work_files import read_rows, read_value, write_rows, write_value

# Digests that are collected in memory before they are written to a file.
_SEGMENT = 2**20
# The average number of digests in a part, which is held in memory to find the copies in it.
_PARTITION = 2**21
# Marks (places where reading can begin) in the text of one shard.
_MARKS = 16
# Documents of prepared text need no names, which tell those that are held out of text in memory.
_NO_NAME = ""
# Characters of documents that share a checksum, at least. The second pass holds them in memory until they are checked.
_CHECKED = 2**24
# A document's key has its number within its file in the low 40 bits, and the file's number above them.
_FILE_SHIFT = 40
# The file with the numbers of all copies.
_COPIES = "copies.json"
# Called from time to time with the numbers of documents, characters and tokens since the last call.
Report = Callable[[int, int, int], None]


def scan_path(work: pathlib.Path, group: int) -> pathlib.Path:
    """The file with the results of `scan` for a group of input files."""
    return work / f"checked-{group:05}.json"


def layout_path(work: pathlib.Path) -> pathlib.Path:
    """The file of the layout. Earlier versions wrote a file of another name, without checksums, which is not read."""
    return work / "checked.json"


def scan(
    work: pathlib.Path,
    inputs: Input,
    options: Options,
    report: Report,
    numbered: tuple[int, tuple[int, int]],
) -> None:
    """Reads a group of files once, and writes the counts, marks and checks of each to `scan_path`.

    A mark is a place where reading can begin: `(documents, characters, records, bytes)` of the file before it. A check is
    `(documents, crc32)`: how many documents of the file are before its end, and the checksum of those since the previous check.
    A check ends at each mark. `state` is the file's size and time. The checksums show a change of the text before the second
    pass, which the files' signatures do not cover. With `deduplicate` the digest of every document is written to files, whose names
    are in the result.

    Args:
        work: the folder of intermediate files.
        inputs: all input files.
        options: how they are processed.
        report: called with the progress, see `Report`.
        numbered: the index and the value of an item of `inputs.groups()`, the files to read.
    """
    # The group is an argument, because `inputs.groups()` would give other groups if a file's size has changed.
    group, (first, stop) = numbered
    digests = _Digests(work, group) if options.deduplicate else None
    found = []
    for number in range(first, stop):
        inputs.check(number)
        before = state(inputs.files[number])
        left_out: collections.Counter = collections.Counter()
        documents = characters = marked = 0
        marks: list[tuple[int, int, int, int]] = []
        checks: list[tuple[int, int]] = []
        checked, crc32 = (0, 0), 0
        reported = documents, characters
        for place, pieces in read_file(
            inputs.files[number], _NO_NAME, KEY, options.reading, left_out, Place(0, 0)
        ):
            is_mark = not marks or characters - marked >= options.shard_characters // _MARKS
            if documents > checked[0] and (is_mark or characters - checked[1] >= _CHECKED):
                checks.append((documents, crc32))
                checked, crc32 = (documents, characters), 0
            if is_mark:
                marks.append((documents, characters, place.number, place.offset))
                marked = characters
                report(documents - reported[0], characters - reported[1], 0)
                reported = documents, characters
            for piece in pieces:
                if digests is not None:
                    digests.add(piece, (number << _FILE_SHIFT) + documents)
                documents += 1
                characters += len(piece.text)
                crc32 = _checksum(piece, crc32)
        if documents > checked[0]:
            checks.append((documents, crc32))
        report(documents - reported[0], characters - reported[1], 0)
        found.append(
            {
                "documents": documents,
                "characters": characters,
                "marks": marks,
                "checks": checks,
                "state": before,
                "left_out": dict(left_out),
            }
        )
    segments = digests.flush() if digests is not None else []
    write_value(scan_path(work, group), {"files": found, "digests": segments})


def _checksum(document: Document, crc32: int) -> int:
    """The checksum of some documents and one more; `crc32` is that of the documents before."""
    text = document.text.encode("utf-8")
    return zlib.crc32(text, zlib.crc32(len(text).to_bytes(8, "big"), crc32))


def scanned(work: pathlib.Path, groups: Iterable[int]) -> tuple[list[dict], list[str]]:
    """The results of `scan` for some groups: the counts, marks and checks of each input file, and the names of all files of digests.

    Raises `UserError` if a result is damaged.
    """
    found = [read_value(scan_path(work, group)) for group in groups]
    files = [file for one in found for file in one["files"]]
    return files, [name for one in found for name in one["digests"]]


class _Digests:
    """Collects documents' digests, and writes them in segments: files of rows [documents, 3], sorted.

    A row is both halves of the digest and the document's key.
    """

    def __init__(self, work: pathlib.Path, group: int):
        self._work, self._group = work, group
        self._rows: list[bytes] = []
        self._names: list[str] = []

    def add(self, document: Document, key: int) -> None:
        self._rows.append(digest_of(document) + key.to_bytes(8, "big"))
        if len(self._rows) == _SEGMENT:
            self.flush()

    def flush(self) -> list[str]:
        """Writes what was added since the last call, and returns the names of all files."""
        rows_N3 = np.frombuffer(b"".join(self._rows), ">u8").reshape(-1, 3).astype(np.uint64)
        rows_N3 = rows_N3[np.argsort(rows_N3[:, 0], kind="stable")]
        name = f"digests-{self._group:05}-{len(self._names):05}.json"
        write_rows(self._work / name, rows_N3)
        self._names.append(name)
        self._rows = []
        return self._names


def copies_path(work: pathlib.Path, part: int) -> pathlib.Path:
    """The file with the results of `find_copies` for a part of the digests."""
    return work / f"copies-{part:05}.json"


def find_copies(work: pathlib.Path, digests: Sequence[str], num_parts: int, part: int) -> None:
    """Writes the keys of the documents that equal an earlier one, for one of `num_parts` equal ranges of digests."""
    lowest, highest = (2**64 * part // num_parts, 2**64 * (part + 1) // num_parts - 1)
    rows_N3 = np.concatenate([read_rows(work / name, lowest, highest) for name in digests])
    rows_N3 = rows_N3[np.lexsort((rows_N3[:, 2], rows_N3[:, 1], rows_N3[:, 0]))]
    is_copy = np.zeros(len(rows_N3), bool)
    is_copy[1:] = (rows_N3[1:, :2] == rows_N3[:-1, :2]).all(1)
    write_rows(copies_path(work, part), np.sort(rows_N3[is_copy, 2])[:, None])


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
        if first == stop:
            return set()
        return set(read_rows(self.work / _COPIES, first, stop - 1)[:, 0].tolist())

    def num_kept(self, shard: int) -> int:
        """The number of documents of a shard that are not copies."""
        first, stop = self.bounds[shard], self.bounds[shard + 1]
        return stop - first - len(self.copies(first, stop))

    def touched(self) -> list[int]:
        """The numbers of the input files that were written to since they were scanned; of the local ones only."""
        found = []
        for number, name in enumerate(self.inputs.files):
            now = state(name)
            if now is not None and list(now) != self.files[number]["state"]:
                found.append(number)
        return found

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
        file = self._file_of(first)
        while first < stop:
            self.inputs.check(file)
            base = int(self.first_document[file])
            for number, piece in self._checked(file, first - base, stop - base, options):
                yield base + number, piece
            self.inputs.check(file)
            file += 1
            first = max(first, int(self.first_document[file]))

    def _checked(
        self, file: int, first: int, stop: int, options: Options
    ) -> Iterator[tuple[int, Document]]:
        """The documents of one file from `first` to `stop`, with their numbers in the file, each after its check."""
        about, name = self.files[file], self.inputs.files[file]
        marks = [mark for mark in about["marks"] if mark[0] <= first]
        if not marks:
            return
        begin, _, record, offset = marks[-1]
        checks = [check for check in about["checks"] if check[0] > begin]
        # `read_file` counts into it. The count is not used, because `scan` has counted these records.
        left_out: collections.Counter = collections.Counter()
        read = read_file(name, _NO_NAME, KEY, options.reading, left_out, Place(record, offset))
        pieces = (piece for _, pieces in read for piece in pieces)
        for end, expected in checks:
            if begin >= stop:
                return
            some, crc32 = list(itertools.islice(pieces, end - begin)), 0
            for piece in some:
                crc32 = _checksum(piece, crc32)
            if len(some) < end - begin or crc32 != expected:
                raise changed(name)
            for number, piece in enumerate(some, begin):
                if first <= number < stop:
                    yield number, piece
            begin = end

    def save(self) -> None:
        """Writes the layout to `work`, for `load`."""
        write_value(
            layout_path(self.work),
            {"input": dataclasses.asdict(self.inputs), "files": self.files, "bounds": self.bounds},
        )

    @classmethod
    def load(cls, work: pathlib.Path) -> "Layout":
        """Reads what `save` wrote. Raises `UserError` if it is missing or damaged."""
        stored = read_value(layout_path(work))
        inputs = Input(tuple(stored["input"]["files"]), tuple(stored["input"]["states"]))
        return cls(work, inputs, stored["files"], stored["bounds"])


def merge_copies(work: pathlib.Path, first_document: np.ndarray, parts: int) -> np.ndarray:
    """Writes and returns the numbers of all copies, sorted; takes 8 bytes of memory for each.

    Args:
        work: the folder with the results of `find_copies`.
        first_document: the number of each file's first document.
        parts: the number of parts of the digests; 0 without `deduplicate`.
    """
    keys = [read_rows(copies_path(work, part))[:, 0] for part in range(parts)]
    keys_N = np.concatenate([np.zeros(0, np.uint64), *keys])
    inside = np.uint64((1 << _FILE_SHIFT) - 1)
    file_N = (keys_N >> np.uint64(_FILE_SHIFT)).astype(np.int64)
    inside_N = (keys_N & inside).astype(np.int64)
    copies_N = np.sort(first_document[file_N] + inside_N)
    write_rows(work / _COPIES, copies_N[:, None])
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
