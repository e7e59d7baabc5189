"""Reads documents from text files: .txt, .jsonl, .json (each also compressed, as .gz or .zst) and .parquet.

Files are streamed, from their beginning or from a place inside; only a .txt, which is one document, is read whole.
A bad record is either an error that names file and line, or is counted and left out.
"""

import bisect
import codecs
import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from calm_jax.cli.files import is_unicode
from calm_jax.data.files import (
    COMPRESSIONS,
    MOST_BYTES,
    START,
    BadRecord,
    Place,
    format_of,
    library,
    lines_from,
    opened,
    state,
    too_long,
)
from calm_jax.errors import UserError, reason_of, require_one_of, typed_reason_of


@dataclasses.dataclass(frozen=True)
class Reading:
    """How files become documents.

    Attributes:
        text_field: the field of a record that holds the text.
        prompt_field: the field that holds the prompt; empty for records without prompts.
        on_bad_record: "raise" turns the first bad record into a `UserError`; "skip" counts bad records by their fault.
        min_characters: shorter texts are counted and left out.
        max_words: longer texts are cut into pieces of this many words; words are separated by single spaces; 0 for no limit.
        flags: the prefix of these options on the command line, for messages.
    """

    text_field: str
    prompt_field: str = ""
    on_bad_record: str = "raise"
    min_characters: int = 0
    max_words: int = 0
    flags: str = "--config.data."

    def __post_init__(self) -> None:
        name = self.flags.removeprefix("--config.")
        require_one_of(f"{name}on_bad_record", self.on_bad_record, ("raise", "skip"))
        for key in ("min_characters", "max_words"):
            if getattr(self, key) < 0:
                raise UserError(f"{name}{key}={getattr(self, key)} must not be negative")
        if self.prompt_field and self.prompt_field == self.text_field:
            raise UserError(
                f"{name}prompt_field={self.prompt_field!r} equals {name}text_field: prompt and completion must be two fields"
            )
        if self.prompt_field and self.max_words:
            raise UserError(
                f"{name}max_words={self.max_words} is for text without prompts: a completion cut into pieces would leave the later pieces without a prompt; give 0"
            )


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to train or score on.

    Attributes:
        name: decides whether the document is held out; all pieces of a text share its name.
        text: the text, or the completion of a record with a prompt.
        prompt: precedes the text in the model's input; its tokens are not targets. None for running text.
    """

    name: str
    text: str
    prompt: str | None = None


_ONE_A_LINE = "a .json, too, holds one record on each line"


def _field(record: Any, reading: Reading, option: str) -> str:
    """The text of a record's field. `option`: of `reading`, gives the field's name."""
    name = getattr(reading, option)
    if not isinstance(record, dict):
        raise BadRecord(
            "no object",
            f"not an object with fields but a {type(record).__name__} ({_ONE_A_LINE})",
        )
    if name not in record:
        detail = f"no field {name!r}: {reading.flags}{option}=NAME takes another"
        if reading.prompt_field:
            detail += (
                "; text without prompts, in a mixture, is .txt files, prepared text or 'stdlib:'"
            )
        raise BadRecord("missing field", detail)
    text = record[name]
    if not isinstance(text, str):
        raise BadRecord("not text", f"field {name!r} is {type(text).__name__}, not a string")
    if not is_unicode(text):
        raise BadRecord("lone surrogate", f"field {name!r} has a lone surrogate")
    return text


def _document(record: Any, name: str, reading: Reading) -> Document:
    text = _field(record, reading, "text_field")
    prompt = _field(record, reading, "prompt_field") if reading.prompt_field else None
    return Document(name, text, prompt)


# The deepest nesting of JSON that is parsed. It is well below the interpreter's recursion limit, close to which other code,
# such as a garbage collector's callback, would fail.
_MOST_LEVELS = 300
_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)


def _is_too_deep(line: bytes) -> bool:
    """Whether JSON nests lists and objects more than `_MOST_LEVELS` deep; brackets inside strings do not count."""
    if line.count(b"[") + line.count(b"{") <= _MOST_LEVELS:
        return False
    level = 0
    for found in _STRINGS_AND_BRACKETS.finditer(line):
        level += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
        if level > _MOST_LEVELS:
            return True
    return False


def _not_utf8(error: UnicodeDecodeError) -> BadRecord:
    is_utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    known = "utf-16 -t utf-8 converts UTF-16" if is_utf16 else "latin1 -t utf-8 converts Latin-1"
    return BadRecord("invalid UTF-8", f"byte {error.start} is not valid UTF-8 (iconv -f {known})")


def _parse(line: bytes, name: str, reading: Reading) -> Document:
    if _is_too_deep(line):
        raise BadRecord("malformed JSON", f"more than {_MOST_LEVELS} levels of lists and objects")
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error
    except ValueError as error:  # malformed, or a number of more digits than Python converts
        command = {b"[": "jq -c '.[]'", b"[{": "jq -c '.[]'", b"{": "jq -c ."}.get(line.strip())
        hint = f"; {_ONE_A_LINE}, as `{command}` writes" if command else ""
        raise BadRecord("malformed JSON", f"not valid JSON ({error}){hint}") from error
    return _document(record, name, reading)


# The place in the file where a record begins (None if the fault is the whole file's), and its document or its fault.
_Item = tuple[Place | None, Document | BadRecord]


def _read_text(file: str, name: str) -> Iterator[_Item]:
    with opened(file) as source:
        text = source.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        yield None, too_long("text", ": split it, as `split -C 200m --additional-suffix=.txt` does")
        return
    try:
        # The bytes are decoded here, because a file opened in text mode turns every line end into "\n". Some editors begin a file
        # with a byte order mark.
        yield START, Document(name, text.decode("utf-8").removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        yield None, _not_utf8(error)


def _read_lines(file: str, name: str, reading: Reading, start: Place) -> Iterator[_Item]:
    with opened(file) as source:
        for place, line in lines_from(file, source, start):
            try:
                if isinstance(line, BadRecord):
                    raise line
                # Some editors begin a file with a byte order mark.
                line = line if place.number else line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield place, _parse(line, f"{name}:{place.number + 1}", reading)
            except BadRecord as bad:
                yield place, bad


def _read_parquet(file: str, name: str, reading: Reading, start: Place) -> Iterator[_Item]:
    library("pyarrow", file)
    import pyarrow
    import pyarrow.parquet

    with opened(file) as source:
        try:
            table = pyarrow.parquet.ParquetFile(source)
            asked = [column for column in (reading.text_field, reading.prompt_field) if column]
            there = [column for column in asked if column in table.schema_arrow.names]
            sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
            # A Parquet file can be read from the beginning of any row group.
            ends = list(itertools.accumulate(sizes))
            first = bisect.bisect_right(ends, start.number)
            number = ends[first - 1] if first else 0
            groups = range(first, len(sizes))
            for batch in table.iter_batches(batch_size=256, columns=there, row_groups=groups):
                for record in batch.to_pylist():
                    if number >= start.number:
                        place = Place(number, number)
                        try:
                            yield place, _document(record, f"{name}:{number + 1}", reading)
                        except BadRecord as bad:
                            yield place, bad
                    number += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            # pyarrow reports damage as an OSError without errno; one with errno is a failed read.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = f"not a complete Parquet file ({reason_of(error)})"
            raise BadRecord("damaged file", reason) from error


def _without_compression(name: str) -> str:
    for suffix in COMPRESSIONS:
        name = name.removesuffix(suffix)
    return name


def names_of(files: Sequence[str]) -> dict[str, str]:
    """Maps each file to the name of its documents, which decides whether they are held out.

    The name is the file's own; where several files have the same one, it is the path from the folder that they have in common.
    It does not depend on the compression of the file, nor on the current folder.
    """
    alike: dict[str, list[str]] = {}
    for file in files:
        name = _without_compression(pathlib.PurePosixPath(file).name)
        alike.setdefault(name, []).append(file)
    names = {}
    for name, some in alike.items():
        if len(some) == 1:
            names[some[0]] = name
            continue
        paths = ["/" + file if "://" in file else os.path.abspath(file) for file in some]
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        for file, path in zip(some, paths, strict=True):
            names[file] = _without_compression(os.path.relpath(path, common))
    return {file: names[file] for file in files}


def _read_items(file: str, name: str, reading: Reading, start: Place) -> Iterator[_Item]:
    try:
        if format_of(file) == ".txt":
            yield from _read_text(file, name)
        elif format_of(file) == ".parquet":
            yield from _read_parquet(file, name, reading, start)
        else:
            yield from _read_lines(file, name, reading, start)
    except BadRecord as bad:
        yield None, bad


def pieces(document: Document, max_words: int) -> list[Document]:
    """Cuts a document into pieces of at most `max_words` words; 0 leaves it whole."""
    if not max_words or document.text.count(" ") < max_words:
        return [document]
    words = document.text.split(" ")
    return [
        dataclasses.replace(document, text=" ".join(words[first : first + max_words]))
        for first in range(0, len(words), max_words)
    ]


def kept(document: Document, reading: Reading, skipped: collections.Counter) -> list[Document]:
    """The document, a long one as its pieces; none, counted by reason, if it is shorter than `reading` allows."""
    if len(document.text) < reading.min_characters:
        skipped[f"under {reading.min_characters} characters"] += 1
        return []
    return pieces(document, reading.max_words)


def check_fields(file: str, key: str, reading: Reading) -> None:
    """Raises `UserError` if prompts are to be read from a file without fields."""
    if reading.prompt_field and format_of(file) == ".txt":
        prefix = reading.flags.removeprefix("--config.")
        raise UserError(
            f"{key}: {file} has no field {reading.prompt_field!r} ({prefix}prompt_field): give .jsonl, .json or .parquet, or in "
            "data.train_files a weight for each entry (data.mixture)"
        )


def read_file(
    file: str,
    name: str,
    key: str,
    reading: Reading,
    skipped: collections.Counter,
    start: Place,
) -> Iterator[tuple[Place, list[Document]]]:
    """Reads the records of a file; from a damaged file, those before the damage.

    Args:
        file: the file's path.
        name: the name of its documents (`names_of`).
        key: the config key or flag that named the file, for messages.
        reading: how records become documents.
        skipped: counts the records that are left out, by reason.
        start: the place of the first record to read.

    Yields:
        `(place, documents)`: where a record begins, and its document in a list; a long one as its pieces (`max_words`).

    Raises:
        UserError: a bad record under `on_bad_record="raise"`, or a file that cannot be read or changes while it is read.
    """
    check_fields(file, key, reading)
    try:
        before = state(file)
        for place, item in _read_items(file, name, reading, start):
            if isinstance(item, BadRecord):
                if reading.on_bad_record == "raise":
                    where = file if place is None else f"{file}, {_unit(file)} {place.number + 1}"
                    raise UserError(
                        f"{where}: {item.detail}; correct it, or leave such records out with "
                        f"{reading.flags}on_bad_record=skip"
                    )
                skipped[item.reason] += 1
            # An empty completion is a valid answer to a prompt.
            elif not item.text and not reading.prompt_field:
                skipped["empty"] += 1
            elif documents := kept(item, reading, skipped):
                yield place or START, documents
        if state(file) != before:
            raise UserError(f"{key}: {file} was changed while it was read: try again")
    except OSError as error:
        raise UserError(f"{key}: {file} cannot be read: {error.strerror or error}") from error
    except UserError:
        raise
    except Exception as error:
        # Each remote file system's library raises exceptions of its own.
        if "://" not in file:
            raise
        raise UserError(f"{key}: {file} cannot be read ({typed_reason_of(error)})") from error


def _unit(file: str) -> str:
    return "row" if format_of(file) == ".parquet" else "line"


def read_documents(
    files: Sequence[str], key: str, reading: Reading, skipped: collections.Counter
) -> Iterator[Document]:
    """The documents of several files, in order; for the arguments see `read_file`."""
    for file, name in names_of(files).items():
        for _, documents in read_file(file, name, key, reading, skipped, START):
            yield from documents


def digest_of(document: Document) -> bytes:
    """A hash of prompt and text, 16 bytes; it does not depend on the name."""
    prompt = (document.prompt or "").encode("utf-8")
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "big") + prompt, digest_size=16)
    digest.update(document.text.encode("utf-8"))
    return digest.digest()
