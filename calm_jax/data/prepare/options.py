"""The input files of a preparation, and the options of their processing."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

from calm_jax.data.documents import Reading
from calm_jax.data.files import library
from calm_jax.data.packing import Frame
from calm_jax.errors import UserError, require_one_of, require_seed

KEY = "--input"
# The largest allowed values.
_MOST = {"chunk_size": 2**12, "shard_characters": 2**40}
# Bytes at the beginning and at the end of a file that its signature covers.
_ENDS = 2**20
# Most files that one task scans, and the bytes after which it takes no further file.
_GROUP_FILES, _GROUP_BYTES = 256, 2**28


@dataclasses.dataclass(frozen=True)
class Options:
    """How text is processed; two runs with the same options, tokenizer and input write the same bytes.

    Attributes:
        text_field, on_bad_record, min_characters, max_words: as in `Reading`.
        append_eos, align_documents_to_chunks, front_fill, chunk_size: as in `Frame`.
        deduplicate: leave out every document that equals an earlier one.
        packing: "all" keeps every token; "published" drops the tokens after the last whole block of every 1,000
            documents.
        block_tokens: tokens of a block, for `packing="published"`; otherwise 0.
        seed: seeds the pads of `front_fill="random"`.
        shard_characters: characters of text after which a shard ends.
    """

    text_field: str
    on_bad_record: str
    min_characters: int
    max_words: int
    append_eos: bool
    align_documents_to_chunks: bool
    front_fill: str
    chunk_size: int
    deduplicate: bool
    packing: str
    block_tokens: int
    seed: int
    shard_characters: int

    def __post_init__(self) -> None:
        _ = self.reading  # checks its own fields
        require_one_of("--front_fill", self.front_fill, ("none", "random"))
        require_one_of("--packing", self.packing, ("all", "published"))
        if self.packing == "published" and self.block_tokens < 1:
            raise UserError(
                f"--block_tokens={self.block_tokens}: --packing=published needs the size of blocks, as in --block_tokens=8192"
            )
        if self.packing == "all" and self.block_tokens:
            raise UserError(
                f"--block_tokens={self.block_tokens} is for --packing=published; with 'all' blocks are cut when the text is read"
            )
        for name in ("chunk_size", "shard_characters"):
            if not 1 <= getattr(self, name) <= _MOST[name]:
                raise UserError(
                    f"--{name}={getattr(self, name)} must be at least 1, and at most {_MOST[name]}"
                )
        require_seed("--seed", self.seed)

    @property
    def identity(self) -> dict:
        """The options that the written bytes depend on.

        `on_bad_record` is left out: "raise" succeeds only without bad records, and then "skip" writes the same bytes.
        """
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "on_bad_record"
        }

    @property
    def reading(self) -> Reading:
        """How input files become documents."""
        return Reading(
            self.text_field, "", self.on_bad_record, self.min_characters, self.max_words, "--"
        )

    @property
    def frame(self) -> Frame:
        """The special tokens around each document."""
        return Frame(
            self.append_eos, self.align_documents_to_chunks, self.front_fill, self.chunk_size
        )


def _signature(file: str) -> str:
    """A string that changes with a file's content: its size and a hash of its first and last bytes, but not its time.

    For a remote file it is the `ukey` of its file system, which changes with the file.
    """
    if "://" in file:
        filesystem, path = library("fsspec", file).core.url_to_fs(file)
        return str(filesystem.ukey(path))
    with open(file, "rb") as source:
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        digest = hashlib.sha256(source.read(_ENDS))
        source.seek(max(0, size - _ENDS))
        digest.update(source.read())
    return f"{size} bytes, {digest.hexdigest()[:16]}"


@dataclasses.dataclass(frozen=True)
class Input:
    """The files to prepare.

    Attributes:
        files: absolute paths, or remote names.
        states: the signature of each file.
    """

    files: tuple[str, ...]
    states: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[str]) -> "Input":
        """The input of these files as they are now. Raises `UserError` if one cannot be read."""
        # Absolute, as workers may have other working folders.
        files = [file if "://" in file else os.path.abspath(file) for file in files]
        return cls(tuple(files), tuple(map(_signed, files)))

    def check(self, number: int) -> None:
        """Raises `UserError` if a file, given by its place in `files`, has changed."""
        file = self.files[number]
        if _signed(file) != self.states[number]:
            raise changed(file)

    def groups(self) -> list[tuple[int, int]]:
        """The files of each scanning task, as pairs of indices into `files`: the first file, and the one after the last."""
        groups, first, size = [], 0, 0
        for number, file in enumerate(self.files):
            size += _GROUP_BYTES if "://" in file else os.path.getsize(file)
            if size >= _GROUP_BYTES or number + 1 - first == _GROUP_FILES:
                groups.append((first, number + 1))
                first, size = number + 1, 0
        return groups + ([(first, len(self.files))] if first < len(self.files) else [])


def changed(file: str) -> UserError:
    """The error for an input file that has changed."""
    return UserError(
        f"{KEY}: {file} has changed since the preparation began: delete the output, or give another one"
    )


def _signed(file: str) -> str:
    """`_signature`, with a `UserError` for a file that cannot be read."""
    try:
        return _signature(file)
    # Each remote file system's library raises exceptions of its own.
    except Exception as error:
        if "://" not in file and not isinstance(error, OSError):
            raise
        raise UserError(
            f"{KEY}: {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
