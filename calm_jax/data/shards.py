"""Prepared text: a folder of token shards on disk, with random access to blocks.

The folder holds `index.json`, `tokenizer/`, and a folder for each shard with

    pages.npy       tokens in pages of 1024, each page with its CRC-32, which is checked at every read
    documents.npy   the index in the shard of each document's first token, and last the shard's number of tokens
    shard.json      the numbers of documents and tokens, the SHA-256 of both files, and that of these facts

The shards, concatenated in order, are one text. It is not cut into blocks, so that one folder serves blocks of any size.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import zlib
from collections.abc import Iterator
from typing import IO

import numpy as np

from calm_jax.cli.files import checked_json, open_regular, read_json
from calm_jax.data.packing import MASKED, document_blocks
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError

FORMAT = "calm_jax tokens 1"
PAGE = 1024
PAGES, DOCUMENTS, SHARD, INDEX = "pages.npy", "documents.npy", "shard.json", "index.json"

# The options of the preparation that the code needs to read the text.
_OPTIONS = (
    "append_eos",
    "align_documents_to_chunks",
    "front_fill",
    "chunk_size",
    "packing",
    "block_tokens",
)
_AGAIN = "give the command that prepared it again"
# The reasons of an index that are shown in other words. In the index they stay as they are, because a run refuses to resume on a
# text whose index has changed.
DUPLICATES, REMAINDERS = "equal to one before", "after the last whole block of 1,000"
_SHOWN = {
    DUPLICATES: "duplicate of an earlier document",
    REMAINDERS: "after the last whole block of a group of 1,000 documents",
}


def page_type(vocab_size: int) -> np.dtype:
    """The dtype of one page: its tokens, uint16 or uint32 by the vocabulary's size, and the CRC-32 of their bytes."""
    token = "<u2" if vocab_size <= 2**16 else "<u4"
    return np.dtype([("tokens", token, (PAGE,)), ("crc32", "<u4")])


def left_out(index: dict) -> dict[str, int]:
    """The number of documents that were left out of a prepared text, by reason, in words to show."""
    return {_SHOWN.get(reason, reason): count for reason, count in index["left_out"].items()}


class ShardWriter:
    """Writes the files of one shard, with only some pages in memory.

    A context manager: the files are complete and synced to disk when the `with` block ends without an error.
    """

    def __init__(self, folder: pathlib.Path, vocab_size: int):
        self._folder, self._type = folder, page_type(vocab_size)
        self._starts: list[int] = []
        self._pending: list[np.ndarray] = []
        self._num_pending = self._num_tokens = self._num_pages = 0
        self._file: IO[bytes] = open(folder / PAGES, "wb")  # noqa: SIM115 (closed by `__exit__`)
        self._write_header()

    def add(self, tokens: np.ndarray) -> None:
        """Appends a document: its tokens with the special tokens around them."""
        self._starts.append(self._num_tokens)
        self._pending.append(tokens)
        self._num_pending += len(tokens)
        self._num_tokens += len(tokens)
        if self._num_pending >= 64 * PAGE:
            self._flush(self._num_pending // PAGE)

    def _flush(self, num_pages: int) -> None:
        tokens = np.concatenate(self._pending) if self._pending else np.zeros(0, np.int32)
        pages = np.zeros(num_pages, self._type)
        whole, rest = tokens[: num_pages * PAGE], tokens[num_pages * PAGE :]
        filler = num_pages * PAGE - len(whole)
        pages["tokens"] = np.pad(whole, (0, filler)).reshape(num_pages, PAGE)
        pages["crc32"] = [zlib.crc32(page) for page in pages["tokens"]]
        self._file.write(pages.tobytes())
        self._pending, self._num_pending = [rest], len(rest)
        self._num_pages += num_pages

    def _write_header(self) -> None:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._type),
            "fortran_order": False,
            "shape": (self._num_pages,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)

    def _finish(self) -> None:
        self._flush(-(-self._num_pending // PAGE))
        # The second header overwrites the first: numpy pads headers so that any number of rows fits.
        self._file.seek(0)
        self._write_header()
        self._file.flush()
        os.fsync(self._file.fileno())
        bounds = np.asarray([*self._starts, self._num_tokens], "<i8")
        # `np.save` into a file does not report a full disk.
        content = io.BytesIO()
        np.save(content, bounds)
        self._write(DOCUMENTS, content.getvalue())
        about = {
            "documents": len(self._starts),
            "tokens": self._num_tokens,
            "sha256": {name: sha256(self._folder / name) for name in (PAGES, DOCUMENTS)},
        }
        self._write(SHARD, checked_json(SHARD, about).encode("utf-8"))

    def _write(self, name: str, content: bytes) -> None:
        with open(self._folder / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is None:
            self._finish()
        self._file.close()


def sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal. Raises `OSError` for anything else."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_prepared(folder: str) -> bool:
    """Whether an entry of `data.train_files` names an existing folder, which must then be prepared text."""
    return "://" not in folder and os.path.isdir(folder) and not any(c in folder for c in "*?[")


class PreparedText:
    """A folder of prepared text, as one long sequence of tokens with random access.

    The constructor raises `UserError` if the folder is incomplete; every read raises it if what it reads is damaged.

    Attributes:
        folder: the folder.
        index: the content of its `index.json`.
        num_documents, num_tokens: documents and tokens of all shards.
        options: the options of the preparation.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.index = read_index(folder)
        self._shards = self.index["shards"]
        self.num_documents, self.num_tokens = self.index["documents"], self.index["tokens"]
        self.options: dict = self.index["options"]
        self._type = page_type(self.index["tokenizer"]["vocab_size"])
        sizes = [shard["tokens"] for shard in self._shards]
        self._first_S = np.cumsum([0, *sizes])
        self._header = [self._check_size(shard) for shard in self._shards]
        # Open files are cached; their number stays far below the usual limit of a process.
        self._opened = functools.lru_cache(maxsize=128)(self._open)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises `UserError` if it is missing or damaged, or the index names another."""
        tokenizer = load_tokenizer(self.folder / "tokenizer")
        if tokenizer.description != self.index["tokenizer"]:
            raise UserError(
                f"{self.folder}/tokenizer is not the one that {INDEX} describes: {_AGAIN}"
            )
        return tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the index, which holds the checksums of all tokens: equal for folders with the same tokens."""
        return hashlib.sha256(json.dumps(self.index).encode()).hexdigest()[:16]

    def _damaged(self, shard: dict, what: str) -> UserError:
        path = self.folder / shard["name"]
        return UserError(
            f"{path}: {what}: delete this folder, and give the command that prepared {self.folder} again to restore it"
        )

    def _check_size(self, shard: dict) -> int:
        """The size of the header of a shard's pages, in bytes. Raises `UserError` if the shard's files have wrong sizes."""
        path = self.folder / shard["name"] / PAGES
        body = -(-shard["tokens"] // PAGE) * self._type.itemsize
        try:
            header = path.stat().st_size - body
            documents = (self.folder / shard["name"] / DOCUMENTS).stat().st_size
            documents -= 8 * (shard["documents"] + 1)
        except OSError as error:
            raise self._damaged(shard, f"{path.name} cannot be read ({error.strerror})") from error
        if not 0 < header < 2**16 or not 0 < documents < 2**16:
            raise self._damaged(shard, f"its files do not have the sizes that follow from {INDEX}")
        return header

    def _open(self, number: int) -> IO[bytes]:
        path = self.folder / self._shards[number]["name"] / PAGES
        return open(path, "rb", buffering=0)

    def tokens(self, first: int, size: int) -> np.ndarray:
        """Reads `size` tokens from `first` on, int32 [size]. Raises `UserError` if a page's checksum is wrong."""
        number = int(np.searchsorted(self._first_S, first, side="right")) - 1
        parts = [np.zeros(0, np.int32)] if not size else []
        while size:
            inside = first - int(self._first_S[number])
            part = min(size, self._shards[number]["tokens"] - inside)
            if part:
                parts.append(self._read(number, inside, part))
            first, size, number = first + part, size - part, number + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, number: int, first: int, size: int) -> np.ndarray:
        begin, end = first // PAGE, -(-(first + size) // PAGE)
        item, shard = self._type.itemsize, self._shards[number]
        try:
            file = self._opened(number)
            data = os.pread(
                file.fileno(), (end - begin) * item, self._header[number] + begin * item
            )
        except OSError as error:
            raise self._damaged(shard, f"{PAGES} cannot be read ({error.strerror})") from error
        if len(data) < (end - begin) * item:
            raise self._damaged(shard, "the file has become shorter")
        pages = np.frombuffer(data, self._type)
        for place, page in enumerate(pages):
            if zlib.crc32(page["tokens"]) != page["crc32"]:
                raise self._damaged(shard, f"the checksum of page {begin + place} is wrong")
        tokens = pages["tokens"].reshape(-1)[first - begin * PAGE :][:size]
        if tokens.max() >= self.index["tokenizer"]["vocab_size"]:
            raise self._damaged(shard, f"token {tokens.max()} is outside the vocabulary")
        return tokens.astype(np.int32)

    def bounds(self, number: int) -> np.ndarray:
        """The indices at which the documents of a shard begin, and last the index at which it ends, int64 [documents + 1].

        Indices count tokens from the beginning of the whole text. Raises `UserError` if the file is damaged.
        """
        self._check_file(number, DOCUMENTS)
        bounds = np.load(self.folder / self._shards[number]["name"] / DOCUMENTS)
        return bounds + self._first_S[number]

    def starts(self) -> np.ndarray:
        """The index at which each document begins in the whole text, int64 [documents]."""
        return np.concatenate([self.bounds(number)[:-1] for number in range(self.num_shards)])

    @property
    def num_shards(self) -> int:
        return len(self._shards)

    def documents(self, stride: int) -> Iterator[np.ndarray]:
        """The tokens of every `stride`-th document, special tokens included."""
        count = 0
        for number in range(self.num_shards):
            bounds = self.bounds(number)
            num_documents = len(bounds) - 1
            for place in range(-count % stride, num_documents, stride):
                yield self.tokens(int(bounds[place]), int(bounds[place + 1] - bounds[place]))
            count += num_documents

    def check(self, number: int) -> None:
        """Reads a whole shard. Raises `UserError` if the SHA-256 of one of its files is wrong."""
        for name in self._shards[number]["sha256"]:
            self._check_file(number, name)

    def _check_file(self, number: int, name: str) -> None:
        shard = self._shards[number]
        try:
            actual = sha256(self.folder / shard["name"] / name)
        except OSError as error:
            raise self._damaged(shard, f"{name} cannot be read ({error.strerror})") from error
        if actual != shard["sha256"][name]:
            raise self._damaged(shard, f"the checksum of {name} is wrong")


def _are_counts(*values: object) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


def _is_whole(index: dict) -> bool:
    """Whether an index has all parts that a preparation writes.

    Raises `KeyError`, `TypeError` or `AttributeError` if a part is missing or has another type.
    """
    shards, options, tokenizer = index["shards"], index["options"], index["tokenizer"]
    _ = [options[name] for name in _OPTIONS]
    return (
        isinstance(index["left_out"], dict)
        and _are_counts(*index["left_out"].values())
        and _are_counts(options["chunk_size"] - 1, options["block_tokens"])
        and _are_counts(tokenizer["vocab_size"])
        and isinstance(tokenizer["fingerprint"], str)
        and all(_are_counts(shard["documents"], shard["tokens"]) for shard in shards)
        # Any other name could lead out of the folder.
        and all(re.fullmatch(r"shard-\d+-of-\d+", shard["name"]) for shard in shards)
        and all(shard["sha256"].keys() == {PAGES, DOCUMENTS} for shard in shards)
        and index["documents"] == sum(shard["documents"] for shard in shards)
        and index["tokens"] == sum(shard["tokens"] for shard in shards)
    )


def read_index(folder: pathlib.Path) -> dict:
    """The index of a folder of prepared text, whose shards may be missing. Raises `UserError` if the index is missing or damaged."""
    path = folder / INDEX
    try:
        index = read_json(path)
        known = index["format"]
        # An index of another format may lack keys.
        is_whole = known != FORMAT or _is_whole(index)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} has no {INDEX}: it is no prepared text, or its preparation has not finished (python -m "
            f"calm_jax.data.prepare); to read files in it give a glob, such as {folder}/*.jsonl"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): {_AGAIN}") from error
    if known != FORMAT:
        raise UserError(f"{path} has the format {known!r}, this version reads {FORMAT!r}: {_AGAIN}")
    if not is_whole:
        raise UserError(
            f"{path} is damaged (its totals do not match its shards, or it has values that no preparation writes): {_AGAIN}"
        )
    return index


@dataclasses.dataclass(frozen=True)
class PreparedBlocks:
    """Blocks of a prepared text: a random-access source of {"tokens", "targets"}, int32 [block_tokens] each.

    Attributes:
        text: the text.
        block_tokens: tokens of a block.
        first_N, size_N: the first token and the number of tokens of each block, which is filled up with masked pads;
            None for consecutive full blocks.
    """

    text: PreparedText
    block_tokens: int
    first_N: np.ndarray | None = None
    size_N: np.ndarray | None = None

    def __len__(self) -> int:
        if self.first_N is None:
            return self.text.num_tokens // self.block_tokens
        return len(self.first_N)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        if self.first_N is None or self.size_N is None:
            tokens = self.text.tokens(int(index) * self.block_tokens, self.block_tokens)
            return {"tokens": tokens, "targets": tokens}
        size = int(self.size_N[index])
        tokens = np.full(self.block_tokens, self.text.index["tokenizer"]["pad_id"], np.int32)
        tokens[:size] = self.text.tokens(int(self.first_N[index]), size)
        targets = np.where(np.arange(self.block_tokens) < size, tokens, np.int32(MASKED))
        return {"tokens": tokens, "targets": targets}

    def targets(self, index_N: np.ndarray) -> np.ndarray:
        """The targets of the blocks `index_N`, [N, T]."""
        return np.stack([self[index]["targets"] for index in index_N])


def prepared_blocks(text: PreparedText, block_tokens: int, packing: str) -> PreparedBlocks:
    """The blocks of a prepared text. With `packing="documents"` a block holds whole documents of a single shard."""
    if packing != "documents":
        return PreparedBlocks(text, block_tokens)
    nothing = np.zeros(0, np.int64)
    firsts, sizes = [nothing], [nothing]
    for number in range(text.num_shards):
        bounds = text.bounds(number)
        if len(bounds) > 1:
            starts_D = bounds[:-1] - bounds[0]
            first_N, size_N = document_blocks(starts_D, int(bounds[-1] - bounds[0]), block_tokens)
            firsts.append(first_N + bounds[0])
            sizes.append(size_N)
    return PreparedBlocks(text, block_tokens, np.concatenate(firsts), np.concatenate(sizes))
