"""Documents: from text files, or from the source text of the running Python's standard library."""

import collections
import dataclasses
import glob
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator
from typing import Any

from absl import logging

from calm_jax.errors import UserError

# Folders of the standard library that are not its own source text: tests, and packages vendored by pip's installer.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
# Tables of character names and keywords' help texts: generated, not written.
_GENERATED = {"encodings", "pydoc_data"}
_SUFFIXES = (".txt", ".jsonl", ".json")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`config.data`; every key is described in `configs/common.py`."""

    train_files: str
    validation_files: str
    text_field: str
    prompt_field: str
    holdout_every: int
    on_bad_record: str

    def __post_init__(self):
        if self.on_bad_record not in ("raise", "skip"):
            raise UserError(f"data.on_bad_record={self.on_bad_record!r} must be 'raise' or 'skip'")
        if self.holdout_every < 2:
            raise UserError(f"data.holdout_every={self.holdout_every} must be at least 2")
        if self.prompt_field and not (self.train_files or self.validation_files):
            raise UserError(
                f"data.prompt_field={self.prompt_field!r} needs data.train_files with such records"
            )
        if self.prompt_field and self.prompt_field == self.text_field:
            raise UserError(
                f"data.prompt_field={self.prompt_field!r} is data.text_field, too: the completion is another field"
            )


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and the name that decides whether it is held out.

    prompt: what the text follows, to be read and not learnt.
    """

    name: str
    text: str
    prompt: str = ""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two splits. `skipped` counts bad records by what was wrong with them.

    train is empty if the config names validation files alone, which is enough for scoring.
    """

    train: list[Document]
    validation: list[Document]
    skipped: dict[str, int]


def standard_library_documents() -> list[Document]:
    """Every source file of the running Python's standard library, sorted by path."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        folders = set(path.relative_to(root).parts[:-1])
        if folders & (_NOT_SOURCE | _GENERATED):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a few files test other source encodings
        documents.append(Document(path.relative_to(root).as_posix(), text))
    if not documents:
        raise UserError(
            f"this Python has no source files in {root}; give text with --config.data.train_files=GLOB"
        )
    return documents


def _files(globs: str, key: str) -> list[str]:
    files: list[str] = []
    for pattern in globs.split(","):
        matches = sorted(glob.glob(pattern.strip(), recursive=True))
        if not matches:
            raise UserError(f"{key}: no file matches {pattern.strip()!r}")
        files += matches
    for file in files:
        if not file.endswith(_SUFFIXES):
            raise UserError(f"{key}: {file} is none of {', '.join(_SUFFIXES)}")
    return list(dict.fromkeys(files))


def _real_paths(globs: str, key: str) -> set[str]:
    return {os.path.realpath(file) for file in _files(globs, key)}


class _BadRecord(Exception):
    """`reason` is for counting, `detail` for the person who has to find the record."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def _parse(line: bytes, name: str, config: DataConfig) -> Document:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRecord("invalid UTF-8", f"byte {error.start} is not valid UTF-8") from error
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise _BadRecord("malformed JSON", f"not valid JSON ({error})") from error
    text = _field(record, config.text_field)
    return Document(name, text, _field(record, config.prompt_field) if config.prompt_field else "")


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


def _read_file(file: str, config: DataConfig) -> Iterator[Document | tuple[str, _BadRecord]]:
    name = pathlib.Path(file).name
    if file.endswith(".txt"):
        try:
            # Not read_text, which would make "\n" of every line end.
            yield Document(name, pathlib.Path(file).read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            bad = _BadRecord("invalid UTF-8", f"byte {error.start} is not valid UTF-8")
            yield file, bad
        return
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _parse(line, f"{name}:{number}", config)
            except _BadRecord as bad:
                yield f"{file}, line {number}", bad


def _read(globs: str, key: str, config: DataConfig, skipped: collections.Counter) -> list[Document]:
    documents = []
    for file in _files(globs, key):
        if config.prompt_field and file.endswith(".txt"):
            raise UserError(
                f"{key}: {file} has no field {config.prompt_field!r} (data.prompt_field): give .jsonl or .json"
            )
        try:
            for item in _read_file(file, config):
                if isinstance(item, Document):
                    if item.text:
                        documents.append(item)
                    continue
                where, bad = item
                if config.on_bad_record == "raise":
                    raise UserError(
                        f"{where}: {bad.detail}; mend it, or leave such records out with "
                        "--config.data.on_bad_record=skip"
                    )
                skipped[bad.reason] += 1
        except OSError as error:
            raise UserError(f"{key}: {file} cannot be read: {error.strerror}") from error
    if not documents:
        raise UserError(f"{key}={globs!r} holds no text")
    return documents


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def is_held_out(name: str, every: int) -> bool:
    """Whether a document of this name is in the validation split, for one document in `every`."""
    return _hash(name) % every == 0


def _split(documents: list[Document], every: int) -> tuple[list[Document], list[Document]]:
    """Training and validation documents. Of two documents or more, each split gets at least one."""
    held_out = [is_held_out(document.name, every) for document in documents]
    if len(set(held_out)) == 1 and len(documents) > 1:
        hashes = [_hash(document.name) for document in documents]
        odd_one = hashes.index(min(hashes))
        held_out[odd_one] = not held_out[odd_one]
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    return train, [document for document, out in zip(documents, held_out, strict=True) if out]


def load_corpus(config: DataConfig) -> Corpus:
    """Reads both splits. Raises `UserError` on files that are missing, bad or empty."""
    skipped: collections.Counter = collections.Counter()
    if config.train_files:
        documents = _read(config.train_files, "data.train_files", config, skipped)
    elif config.validation_files:
        documents = []
    else:
        documents = standard_library_documents()
    if config.validation_files:
        overlap = _real_paths(config.validation_files, "data.validation_files")
        if config.train_files:
            overlap &= _real_paths(config.train_files, "data.train_files")
        else:
            overlap = set()
        if overlap:
            logging.warning(
                "data.validation_files: %s is among data.train_files too: scores on it say nothing about new text",
                min(overlap),
            )
        validation = _read(config.validation_files, "data.validation_files", config, skipped)
        return Corpus(documents, validation, dict(skipped))
    if len(documents) == 1:
        raise UserError(
            f"data.train_files={config.train_files!r} holds one document, which cannot be both trained on and held "
            "out: name other files for validation with --config.data.validation_files=GLOB"
        )
    train, validation = _split(documents, config.holdout_every)
    return Corpus(train, validation, dict(skipped))
