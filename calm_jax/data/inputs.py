"""What is to be prepared: the files, and what their text is to become."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence

from calm_jax.data.blocks import Frame
from calm_jax.data.documents import Reading
from calm_jax.data.files import library
from calm_jax.errors import UserError

KEY = "--input"
_MOST = {"chunk_size": 2**12, "shard_characters": 2**40}
# Bytes at both ends of a file that tell it from others.
_ENDS = 2**20
# Files that one task scans, and bytes: small files are many.
_GROUP_FILES, _GROUP_BYTES = 256, 2**28


@dataclasses.dataclass(frozen=True)
class Options:
    """What text becomes; two runs with the same options, tokenizer and input give the same bytes.

    The first four are `Reading`'s, the next four `Frame`'s. deduplicate: leave out every document that is equal to one
    before it. packing: "all" keeps every token, "published" of every 1,000 documents drops what does not fill a block of
    `block_tokens` (SPEC 1). seed: of `front_fill="random"`. shard_characters: text of a shard.
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

    def __post_init__(self):
        _ = self.reading
        if self.front_fill not in ("none", "random"):
            raise UserError(f"--front_fill={self.front_fill!r} must be 'none' or 'random'")
        if self.packing not in ("all", "published"):
            raise UserError(f"--packing={self.packing!r} must be 'all' or 'published'")
        if self.packing == "published" and self.block_tokens < 1:
            raise UserError(
                f"--block_tokens={self.block_tokens}: --packing=published needs the size of blocks, as in --block_tokens=8192"
            )
        if self.packing == "all" and self.block_tokens:
            raise UserError(
                f"--block_tokens={self.block_tokens} is for --packing=published; other blocks are cut when they are read"
            )
        for name in ("chunk_size", "shard_characters"):
            if not 1 <= getattr(self, name) <= _MOST[name]:
                raise UserError(
                    f"--{name}={getattr(self, name)} must be at least 1, and at most {_MOST[name]}"
                )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed={self.seed} must be in [0, 2**32)")

    @property
    def identity(self) -> dict:
        """What the bytes depend on: bad records are an error or left out, and where there are none that is the same."""
        return {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name != "on_bad_record"
        }

    @property
    def reading(self) -> Reading:
        return Reading(
            self.text_field, "", self.on_bad_record, self.min_characters, self.max_words, "--"
        )

    @property
    def frame(self) -> Frame:
        return Frame(
            self.append_eos, self.align_documents_to_chunks, self.front_fill, self.chunk_size
        )


def _signature(file: str) -> str:
    """What tells that a file is another one: its size, and its first and last bytes, not the time that somebody touched it.

    Of a remote file what its file system tells changes by.
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
    """The files to prepare, each with its signature."""

    files: tuple[str, ...]
    states: tuple[str, ...]

    @classmethod
    def of(cls, files: Sequence[str]) -> "Input":
        # Workers may have other working folders.
        files = [file if "://" in file else os.path.abspath(file) for file in files]
        return cls(tuple(files), tuple(map(_signed, files)))

    def check(self, number: int) -> None:
        """Raises `UserError` if a file is not any more what it was."""
        file = self.files[number]
        if _signed(file) != self.states[number]:
            raise UserError(
                f"{KEY}: {file} has changed since this was begun: delete the output, or give another one"
            )

    def groups(self) -> list[tuple[int, int]]:
        """First and last (exclusive) file of each task that scans."""
        groups, first, size = [], 0, 0
        for number, file in enumerate(self.files):
            size += _GROUP_BYTES if "://" in file else os.path.getsize(file)
            if size >= _GROUP_BYTES or number + 1 - first == _GROUP_FILES:
                groups.append((first, number + 1))
                first, size = number + 1, 0
        return groups + ([(first, len(self.files))] if first < len(self.files) else [])


def _signed(file: str) -> str:
    try:
        return _signature(file)
    # Errors of a network are those of whichever library reads it.
    except Exception as error:
        if "://" not in file and not isinstance(error, OSError):
            raise
        raise UserError(
            f"{KEY}: {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
