"""Reads the text of a run: files, prepared shards, or the source of the running Python's standard library."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from absl import logging

from calm_jax.data.documents import (
    Document,
    Reading,
    check_fields,
    digest_of,
    kept,
    read_documents,
)
from calm_jax.data.files import find_files, format_of
from calm_jax.data.shards import PreparedText, is_prepared
from calm_jax.errors import UserError, require_at_least

# Folders that are not the standard library's own source: tests, installed packages, and those that ensurepip bundles.
_NOT_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "ensurepip"}
# Generated folders: character tables, and the help texts of keywords.
_GENERATED = {"encodings", "pydoc_data"}
# The entry of `train_files` that is the source of the running Python's standard library.
STANDARD_LIBRARY = "stdlib:"


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

    def __post_init__(self) -> None:
        _ = self.reading  # checks its own fields
        require_at_least(2, self, "data.", "holdout_every")
        require_at_least(0, self, "data.", "read_threads")
        if self.prompt_field and not (self.train_files or self.validation_files):
            raise UserError(
                f"data.prompt_field={self.prompt_field!r} needs data.train_files with such records"
            )
        # An evaluation on validation files may leave the training text empty.
        if self.mixture and (self.train_files or not self.validation_files):
            self._check_mixture()

    def _check_mixture(self) -> None:
        entries = _entries(self.train_files or STANDARD_LIBRARY)
        if len(self.mixture) != len(entries):
            raise UserError(
                f"data.mixture={self.mixture} must have a weight for each of the {len(entries)} comma-separated entries of "
                f"data.train_files={self.train_files!r}"
            )
        if not all(weight > 0 and math.isfinite(weight) for weight in self.mixture):
            raise UserError(f"data.mixture={self.mixture} must hold positive numbers")

    @property
    def reading(self) -> Reading:
        """How training files become documents."""
        return Reading(
            self.text_field,
            self.prompt_field,
            self.on_bad_record,
            self.min_characters,
            self.max_words,
        )

    @property
    def names_folders(self) -> bool:
        """Whether some of the training text is a folder of prepared text, which has its own tokenizer."""
        return any(map(_is_folder, _entries(self.train_files) + _entries(self.autoencoder_files)))


def _entries(files: str) -> list[str]:
    return [stripped for entry in files.split(",") if (stripped := entry.strip())]


def _is_folder(entry: str) -> bool:
    """Whether an entry names a folder (existing or not) rather than files."""
    looks_like_it = not (
        pathlib.PurePath(entry).suffix or set(entry) & set("*?[") or "://" in entry
    )
    return (looks_like_it and entry != STANDARD_LIBRARY) or is_prepared(entry)


# Documents in memory, or shards of tokens on disk.
Source = list[Document] | PreparedText


class Cut(NamedTuple):
    """A document whose end is held out: its name, its number of characters, and how many of them are held out."""

    name: str
    characters: int
    held_out: int


class Uneven(NamedTuple):
    """A split into documents that holds out much text: the numbers of documents and characters, all and held out."""

    documents: int
    characters: int
    held_out_documents: int
    held_out: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text.

    Attributes:
        sources: the text of `data.train_files`; empty if the config names only validation files, for an evaluation.
        autoencoder_sources: the text of `data.autoencoder_files`, or `sources` if that key is empty.
        validation: the documents to score on; if some are records with prompts, these alone.
        skipped: the number of records left out, by reason.
        cut: the documents whose end is held out because each is the only document of its source.
        uneven: the splits into documents that hold out more than twice the share asked for.
    """

    sources: tuple[Source, ...]
    autoencoder_sources: tuple[Source, ...]
    validation: list[Document]
    skipped: dict[str, int]
    cut: tuple["Cut", ...]
    uneven: tuple["Uneven", ...]

    @property
    def train(self) -> list[Document]:
        """The documents of `sources` that are in memory."""
        return _in_memory(self.sources)

    @property
    def autoencoder_train(self) -> list[Document]:
        """The documents of `autoencoder_sources` that are in memory."""
        return _in_memory(self.autoencoder_sources)

    @property
    def prepared(self) -> list[PreparedText]:
        """The prepared texts among all sources."""
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
            continue  # a few files are in other encodings, to test them
        documents.append(Document(path.relative_to(root).as_posix(), text))
    if not documents:
        raise UserError(
            f"this Python has no source files in {root}; give text with --config.data.train_files=GLOB"
        )
    return documents


def _real_paths(globs: str, key: str) -> set[str]:
    """The files that globs match, with symbolic links resolved."""
    return {os.path.realpath(file) for file in find_files(globs, key)}


def _no_folder(entry: str, key: str) -> str:
    way_out = "launch/prepare_pile.sh prepares the published recipes' text, python -m calm_jax.data.prepare any other"
    if key == "data.train_files":
        way_out += "; --mode=eval can do without, --config.data.train_files="
    if key == "data.autoencoder_files":
        way_out += ", and --config.data.autoencoder_files= takes data.train_files"
    return f"{key}: there is no prepared text {entry!r}: {way_out}"


class _Reader:
    """Reads the text that `DataConfig`'s keys name.

    Attributes:
        skipped: the number of records left out so far, by reason.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        # Hashes of the documents of all files, among which `deduplicate` finds copies.
        self._seen: set[bytes] = set()
        self.skipped: collections.Counter = collections.Counter()

    def training(self, entries: list[str], key: str, is_mixture: bool) -> list[Document]:
        """Training documents, without the short and repeated ones that the config leaves out.

        The .txt files and the standard library have no fields, so they have no prompts. Where records have prompts, such
        text is allowed only as a separate entry of a mixture.
        """
        globs = ",".join(entry for entry in entries if entry != STANDARD_LIBRARY)
        reading = self._config.reading
        found: Iterator[Document] = iter(())
        if STANDARD_LIBRARY in entries:
            if reading.prompt_field and not is_mixture:
                raise UserError(
                    f"{key}: {STANDARD_LIBRARY} has no field {reading.prompt_field!r} (data.prompt_field): beside records "
                    "data.train_files needs a weight for each entry (data.mixture)"
                )
            found = itertools.chain.from_iterable(
                kept(document, reading, self.skipped) for document in standard_library_documents()
            )
        if globs:
            files = find_files(globs, key)
            if is_mixture and all(format_of(file) == ".txt" for file in files):
                reading = dataclasses.replace(reading, prompt_field="")
            found = itertools.chain(read_documents(files, key, reading, self.skipped), found)
        if self._config.deduplicate:
            found = filter(self._is_new, found)
        return self._not_empty(list(found), ",".join(entries), key)

    def validation(self, globs: str, key: str) -> list[Document]:
        """Documents to score on: short and repeated ones are kept, and long ones are not cut into pieces."""
        reading = dataclasses.replace(self._config.reading, min_characters=0, max_words=0)
        found = read_documents(find_files(globs, key), key, reading, self.skipped)
        return self._not_empty(list(found), globs, key)

    def _not_empty(self, documents: list[Document], globs: str, key: str) -> list[Document]:
        if not documents:
            raise UserError(f"{key}={globs!r} holds no text")
        return documents

    def _is_new(self, document: Document) -> bool:
        digest = digest_of(document)
        is_new = digest not in self._seen
        self._seen.add(digest)
        self.skipped["duplicate of an earlier document"] += not is_new
        return is_new

    def check(self, files: str, key: str, is_mixture: bool) -> None:
        """Opens folders of prepared text and finds files, without reading them.

        Raises `UserError` if a folder or a file is missing, or a file cannot have prompts that the config reads from it.
        """
        for entry in _entries(files):
            if _is_folder(entry):
                self._prepared(entry, key)
            elif entry != STANDARD_LIBRARY:
                self.check_files(entry, key, is_mixture)

    def check_files(self, globs: str, key: str, is_mixture: bool) -> None:
        """Finds files, without reading them; raises as `check` does."""
        for file in find_files(globs, key):
            if not is_mixture:
                check_fields(file, key, self._config.reading)

    @functools.cache  # noqa: B019 (the cache lives no longer than the reader, which ends with `load_corpus`)
    def _prepared(self, folder: str, key: str) -> PreparedText:
        if not os.path.exists(folder):
            raise UserError(_no_folder(folder, key))
        if os.path.isfile(folder):
            raise UserError(
                f"{key}: {folder} is a file of unknown format: its name must end with .txt, .jsonl, .json or .parquet, or with one of these and the suffix of a compression, as .jsonl.zst"
            )
        if self._config.prompt_field and not self._config.mixture:
            raise UserError(
                f"{key}: {folder} is prepared text, which has no data.prompt_field={self._config.prompt_field!r}: "
                "give files of records instead, or beside them a weight for each entry of data.train_files (data.mixture)"
            )
        return PreparedText(pathlib.Path(folder))

    def sources(self, files: str, key: str, is_mixture: bool) -> list[Source]:
        """The sources that the comma-separated entries of `files` name.

        In a mixture each entry is a source. Otherwise each folder of prepared text is a source, and all other entries,
        which are read into memory, are together the last source.
        """
        sources: list[Source] = []
        together = []
        if not _entries(files):
            raise UserError(f"{key}={files!r} names no file")
        for entry in _entries(files):
            if _is_folder(entry):
                sources.append(self._prepared(entry, key))
            elif is_mixture:
                sources.append(self.training([entry], key, is_mixture))
            else:
                together.append(entry)
        if together:
            sources.append(self.training(together, key, is_mixture))
        return sources


def _hash(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def is_held_out(name: str, every: int) -> bool:
    """Whether the document of this name is in the validation split, which takes about one document in `every`."""
    return _hash(name) % every == 0


def _split(documents: list[Document], every: int) -> tuple[list[Document], list[Document]]:
    """Splits two documents or more into training and validation ones; each split gets at least one.

    The pieces of a text stay together. Of a single text the first piece is held out.
    """
    names = [document.name for document in documents]
    held_out = [is_held_out(name, every) for name in names]
    if len(set(names)) == 1:
        held_out = [place == 0 for place in range(len(names))]
    elif len(set(held_out)) == 1:
        odd = min(set(names), key=_hash)
        held_out = [out != (name == odd) for out, name in zip(held_out, names, strict=True)]
    train = [document for document, out in zip(documents, held_out, strict=True) if not out]
    return train, [document for document, out in zip(documents, held_out, strict=True) if out]


def _cut_end(text: str, every: int) -> int:
    """The index of the character at which the held-out end of a text begins.

    The end is the last 1/`every` of the text, or up to half as much more so that it begins with a line. It depends on
    these arguments alone, so that a resumed run has the same split. Nothing can be held out of a text of fewer than
    `every` characters: the index is then the text's length.
    """
    share = len(text) // every
    latest = len(text) - share
    line = text.rfind("\n", latest - share // 2, latest) + 1
    return line or latest


def load_corpus(
    config: DataConfig, with_train: bool = True, with_autoencoder: bool = True
) -> Corpus:
    """Reads the text of a run; prepared text is opened, and stays on disk.

    Args:
        config: the files and how to read them; without `train_files` the text is Python's standard library.
        with_train: whether to read `train_files`.
        with_autoencoder: whether to read `autoencoder_files`.

    Raises:
        UserError: files are missing, damaged or empty, or there is no text to hold out for validation.
    """
    reader = _Reader(config)
    sources: list[Source] = []
    autoencoder_sources: list[Source] = []
    # What is missing is reported before any text is read.
    if with_train:
        reader.check(config.train_files, "data.train_files", bool(config.mixture))
    if with_autoencoder:
        reader.check(config.autoencoder_files, "data.autoencoder_files", False)
    if config.validation_files:
        reader.check_files(config.validation_files, "data.validation_files", False)
        read = {"train_files": with_train, "autoencoder_files": with_autoencoder}
        _warn_of_overlap(config, [key for key, is_read in read.items() if is_read])
    elif config.names_folders or (with_autoencoder and config.autoencoder_files):
        raise UserError(
            "data.validation_files is empty: nothing is held out of prepared text, nor of data.train_files beside "
            "data.autoencoder_files; name files to score on with --config.data.validation_files=GLOB"
        )
    if with_autoencoder and config.autoencoder_files:
        autoencoder_sources = reader.sources(
            config.autoencoder_files, "data.autoencoder_files", False
        )
    if with_train and (config.train_files or not config.validation_files):
        files = config.train_files or STANDARD_LIBRARY
        sources = reader.sources(files, "data.train_files", bool(config.mixture))
    if config.validation_files:
        validation = reader.validation(config.validation_files, "data.validation_files")
        cut: list[Cut] = []
        uneven: list[Uneven] = []
    else:
        sources, validation, cut, uneven = _hold_out(sources, config)
    # A part of running text that is mixed with records is held out too, so that it can be scored later as unseen text; this
    # run scores the records alone.
    validation = [one for one in validation if one.prompt is not None] or validation
    train = tuple(sources)
    return Corpus(
        train,
        tuple(autoencoder_sources) or train,
        validation,
        dict(reader.skipped),
        tuple(cut),
        tuple(uneven),
    )


def _warn_of_overlap(config: DataConfig, keys: Sequence[str]) -> None:
    """Warns of validation files that are also files of one of `keys`."""
    overlap = _real_paths(config.validation_files, "data.validation_files")
    for key in keys:
        globs = [
            entry
            for entry in _entries(getattr(config, key))
            if not _is_folder(entry) and entry != STANDARD_LIBRARY
        ]
        if globs and (both := overlap & _real_paths(",".join(globs), f"data.{key}")):
            logging.warning(
                "data.validation_files: %s is also one of data.%s: scores on it say nothing about new text",
                min(both),
                key,
            )


def _hold_out(
    sources: Sequence[Source], config: DataConfig
) -> tuple[list[Source], list[Document], list[Cut], list[Uneven]]:
    """Moves a part of every source to the validation text: some documents, or the end of a source's only document.

    Returns `(sources, validation, cut, uneven)`: what is left of the sources, the validation text, and `cut` and `uneven` of
    `Corpus`.
    """
    kept: list[Source] = []
    validation: list[Document] = []
    cut: list[Cut] = []
    uneven: list[Uneven] = []
    for documents in sources:
        assert not isinstance(documents, PreparedText)  # `load_corpus` refuses it
        if len(documents) > 1:
            train, held_out = _split(documents, config.holdout_every)
            all_characters, characters = _characters(documents), _characters(held_out)
            if characters * config.holdout_every > 2 * all_characters:
                uneven.append(Uneven(len(documents), all_characters, len(held_out), characters))
        else:
            (document,) = documents
            end = _cut_end(document.text, config.holdout_every)
            _check_cut(document, end, config)
            train = [Document(document.name, document.text[:end])]
            held_out = [Document(document.name, document.text[end:])]
            characters = len(document.text)
            cut.append(Cut(document.name, characters, characters - end))
        kept.append(train)
        validation += held_out
    return kept, validation, cut, uneven


def _characters(documents: list[Document]) -> int:
    return sum(len(document.text) for document in documents)


def _check_cut(document: Document, end: int, config: DataConfig) -> None:
    """Raises `UserError` if the only document of a source cannot be both trained on and held out."""
    is_record = document.prompt is not None
    if is_record or end == len(document.text):
        what = "record" if is_record else f"document of {len(document.text)} characters"
        raise UserError(
            f"data.train_files={config.train_files!r} holds one {what}, which cannot be both trained on and held "
            "out: give more text, or name other files for validation with --config.data.validation_files=GLOB"
        )
