"""The text of a run: from files, from prepared shards, or the source text of the running Python's standard library."""

import collections
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence

from absl import logging

from calm_jax.data.documents import Distinct, Document, Reading, read_documents
from calm_jax.data.files import find_files
from calm_jax.data.shards import PreparedText, is_prepared
from calm_jax.errors import UserError

# Folders of the standard library that are not its own source text: tests, and packages vendored by pip's installer.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
# Tables of character names and keywords' help texts: generated, not written.
_GENERATED = {"encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`config.data`; every key is described in `configs/common.py`."""

    train_files: str
    mixture: tuple[float, ...]
    autoencoder_files: str
    validation_files: str
    text_field: str
    prompt_field: str
    min_characters: int
    max_words: int
    deduplicate: bool
    holdout_every: int
    on_bad_record: str
    read_threads: int

    def __post_init__(self):
        _ = self.reading
        if self.holdout_every < 2:
            raise UserError(f"data.holdout_every={self.holdout_every} must be at least 2")
        if self.read_threads < 0:
            raise UserError(f"data.read_threads={self.read_threads} must not be negative")
        if self.prompt_field and not (self.train_files or self.validation_files):
            raise UserError(
                f"data.prompt_field={self.prompt_field!r} needs data.train_files with such records"
            )
        # An evaluation may do without the training text.
        if self.mixture and self.train_files:
            self._check_mixture()

    def _check_mixture(self) -> None:
        entries = _entries(self.train_files)
        if len(self.mixture) != len(entries):
            raise UserError(
                f"data.mixture={self.mixture} must have a weight for each of the {len(entries)} comma-separated entries of "
                f"data.train_files={self.train_files!r}"
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in self.mixture):
            raise UserError(f"data.mixture={self.mixture} must hold positive numbers")
        if self.prompt_field:
            raise UserError(
                f"data.mixture={self.mixture}: records with data.prompt_field={self.prompt_field!r} are one source"
            )

    @property
    def reading(self) -> Reading:
        return Reading(
            self.text_field,
            self.prompt_field,
            self.on_bad_record,
            self.min_characters,
            self.max_words,
        )

    @property
    def names_folders(self) -> bool:
        """Whether some of the training text is said to be prepared, and brings its tokenizer."""
        return any(map(_is_folder, _entries(self.train_files) + _entries(self.autoencoder_files)))


def _entries(files: str) -> list[str]:
    return [entry.strip() for entry in files.split(",")] if files else []


def _is_folder(entry: str) -> bool:
    """Whether an entry names a folder, there or not, rather than files."""
    looks_like_it = not (
        pathlib.PurePath(entry).suffix or set(entry) & set("*?[") or "://" in entry
    )
    return looks_like_it or is_prepared(entry)


# Documents in memory, or shards of tokens.
Source = list[Document] | PreparedText


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text. `skipped` counts records that were left out by what was wrong with them.

    sources: of `data.train_files`; none if the config names validation files alone, which is enough for scoring.
    autoencoder_sources: of `data.autoencoder_files`; the same as the others if there are none.
    """

    sources: tuple[Source, ...]
    autoencoder_sources: tuple[Source, ...]
    validation: list[Document]
    skipped: dict[str, int]

    @property
    def train(self) -> list[Document]:
        """The documents of `data.train_files` that are in memory."""
        return _in_memory(self.sources)

    @property
    def autoencoder_train(self) -> list[Document]:
        """The same of `data.autoencoder_files`."""
        return _in_memory(self.autoencoder_sources)

    @property
    def prepared(self) -> list[PreparedText]:
        sources = (*self.sources, *self.autoencoder_sources)
        return [source for source in sources if isinstance(source, PreparedText)]


def _in_memory(sources: Sequence[Source]) -> list[Document]:
    return [
        document
        for source in sources
        if not isinstance(source, PreparedText)
        for document in source
    ]


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


def _no_folder(entry: str, key: str) -> str:
    way_out = "launch/prepare_pile.sh prepares the published recipes' text, python -m calm_jax.data.prepare any other"
    if key == "data.train_files":
        way_out += "; --mode=eval can do without, --config.data.train_files="
    if key == "data.autoencoder_files":
        way_out += ", and --config.data.autoencoder_files= takes data.train_files"
    return f"{key}: there is no prepared text {entry!r}: {way_out}"


class _Reader:
    """Reads what the keys name; counts what is left out, and with `deduplicate` knows what was there."""

    def __init__(self, config: DataConfig):
        self._config, self._distinct = config, Distinct()
        self.skipped: collections.Counter = collections.Counter()

    def training(self, globs: str, key: str) -> list[Document]:
        """Training text, of which some may be left out on purpose."""
        found = self._read(globs, key, self._config.reading)
        if self._config.deduplicate:
            found = filter(self._is_new, found)
        return self._some(list(found), globs, key)

    def validation(self, globs: str, key: str) -> list[Document]:
        """Text to score on, as it is."""
        reading = dataclasses.replace(self._config.reading, min_characters=0, max_words=0)
        return self._some(list(self._read(globs, key, reading)), globs, key)

    def _read(self, globs: str, key: str, reading: Reading) -> Iterator[Document]:
        return read_documents(find_files(globs, key), key, reading, self.skipped)

    def _some(self, documents: list[Document], globs: str, key: str) -> list[Document]:
        if not documents:
            raise UserError(f"{key}={globs!r} holds no text")
        return documents

    def _is_new(self, document: Document) -> bool:
        is_new = self._distinct.is_new(document)
        self.skipped["equal to one before"] += not is_new
        return is_new

    def open_folders(self, files: str, key: str) -> None:
        """Raises `UserError` if a folder of prepared text is not there, or not whole."""
        for entry in filter(_is_folder, _entries(files)):
            self._prepared(entry, key)

    @functools.cache  # noqa: B019 (a reader lives as long as the reading)
    def _prepared(self, folder: str, key: str) -> PreparedText:
        if not os.path.exists(folder):
            raise UserError(_no_folder(folder, key))
        if self._config.prompt_field:
            raise UserError(
                f"{key}: {folder} is prepared text, which has no data.prompt_field={self._config.prompt_field!r}: "
                "give files of records"
            )
        return PreparedText(pathlib.Path(folder))

    def sources(self, files: str, key: str, is_mixture: bool) -> list[Source]:
        """A source for each entry; without weights one for all that is read into memory."""
        sources: list[Source] = []
        globs = []
        for entry in _entries(files):
            if _is_folder(entry):
                sources.append(self._prepared(entry, key))
            elif is_mixture:
                sources.append(self.training(entry, key))
            else:
                globs.append(entry)
        if globs:
            sources.append(self.training(",".join(globs), key))
        return sources


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


def load_corpus(
    config: DataConfig, with_train: bool = True, with_autoencoder: bool = True
) -> Corpus:
    """Reads what a run needs of the training text, and the validation text.

    Raises `UserError` on files that are missing, bad or empty.
    """
    reader = _Reader(config)
    sources: list[Source] = []
    own: list[Source] = []
    # What is missing is missed before anything is read.
    if with_train:
        reader.open_folders(config.train_files, "data.train_files")
    if with_autoencoder:
        reader.open_folders(config.autoencoder_files, "data.autoencoder_files")
    if config.validation_files:
        _warn_of_overlap(config)
    elif config.names_folders or (with_autoencoder and config.autoencoder_files):
        raise UserError(
            "data.validation_files is empty: of prepared text, and beside data.autoencoder_files, nothing is held out; "
            "name files to score on with --config.data.validation_files=GLOB"
        )
    if with_autoencoder and config.autoencoder_files:
        own = reader.sources(config.autoencoder_files, "data.autoencoder_files", False)
    if with_train and config.train_files:
        sources = reader.sources(config.train_files, "data.train_files", bool(config.mixture))
    elif with_train and not config.validation_files:
        sources = [standard_library_documents()]
    if config.validation_files:
        validation = reader.validation(config.validation_files, "data.validation_files")
    else:
        sources, validation = _hold_out(sources, config)
    train = tuple(sources)
    return Corpus(train, tuple(own) or train, validation, dict(reader.skipped))


def _warn_of_overlap(config: DataConfig) -> None:
    overlap = _real_paths(config.validation_files, "data.validation_files")
    for key in ("train_files", "autoencoder_files"):
        globs = [entry for entry in _entries(getattr(config, key)) if not _is_folder(entry)]
        if globs and (both := overlap & _real_paths(",".join(globs), f"data.{key}")):
            logging.warning(
                "data.validation_files: %s is among data.%s too: scores on it say nothing about new text",
                min(both),
                key,
            )


def _hold_out(
    sources: Sequence[list[Document]], config: DataConfig
) -> tuple[list[Source], list[Document]]:
    """Takes the validation text out of the training text, source by source."""
    kept: list[Source] = []
    validation: list[Document] = []
    for documents in sources:
        if len(documents) == 1:
            raise UserError(
                f"data.train_files={config.train_files!r} holds one document, which cannot be both trained on and held "
                "out: name other files for validation with --config.data.validation_files=GLOB"
            )
        train, held_out = _split(documents, config.holdout_every)
        kept.append(train)
        validation += held_out
    return kept, validation
