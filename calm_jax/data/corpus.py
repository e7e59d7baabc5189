"""Documents: from text files, or from the source text of the running Python's standard library."""

import collections
import dataclasses
import hashlib
import os
import pathlib
import sysconfig

from absl import logging

from calm_jax.data.documents import Document, Fields, find_files, read_documents
from calm_jax.errors import UserError

# Folders of the standard library that are not its own source text: tests, and packages vendored by pip's installer.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
# Tables of character names and keywords' help texts: generated, not written.
_GENERATED = {"encodings", "pydoc_data"}


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


def _real_paths(globs: str, key: str) -> set[str]:
    return {os.path.realpath(file) for file in find_files(globs, key)}


def _read(globs: str, key: str, config: DataConfig, skipped: collections.Counter) -> list[Document]:
    fields = Fields(config.text_field, config.prompt_field)
    files = find_files(globs, key)
    documents = list(read_documents(files, key, fields, config.on_bad_record, skipped))
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
