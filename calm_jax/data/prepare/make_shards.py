"""The second pass of a preparation: tokenises documents, writes shards, and at the end the index of all shards."""

import bisect
import functools
import itertools
import json
import os
import pathlib
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from calm_jax.cli.files import open_regular, os_errors, read_checked_json, write_atomically
from calm_jax.data.documents import Document
from calm_jax.data.packing import PUBLISHED_GROUP, whole_blocks
from calm_jax.data.prepare.options import Options
from calm_jax.data.prepare.scan import Layout, Report
from calm_jax.data.shards import (
    DOCUMENTS,
    DUPLICATES,
    FORMAT,
    INDEX,
    PAGE,
    PAGES,
    REMAINDERS,
    SHARD,
    ShardWriter,
    read_index,
    sha256,
)
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError

_AGAIN = "delete this folder and give the same command again"
# Seconds between a worker's reports of progress.
_REPORT_EVERY = 0.5
# Documents between its reports while it only reads.
_DOCUMENTS_OF_REPORT = 5000


def shard_name(number: int, num_shards: int) -> str:
    """The name of a shard's folder."""
    return f"shard-{number:05}-of-{num_shards:05}"


def pending(output: pathlib.Path, num_shards: int) -> list[int]:
    """The numbers of the shards that are missing or incomplete."""
    return [n for n in range(num_shards) if not _is_whole(output / shard_name(n, num_shards))]


def _is_whole(shard: pathlib.Path) -> bool:
    """Whether a shard's files are complete; the content of its pages is not checked."""
    try:
        about = _about(shard)
        with open_regular(shard / PAGES) as file:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            size = os.fstat(file.fileno()).st_size - file.tell()
    # numpy raises exceptions of many types for a damaged header.
    except Exception:
        return False
    return shape == (-(-about["tokens"] // PAGE),) and size == shape[0] * dtype.itemsize


def make_shards(
    output: pathlib.Path, work: pathlib.Path, options: Options, report: Report, run: tuple[int, int]
) -> None:
    """A worker's task: makes consecutive shards in one reading of their text. A shard's folder appears once it is complete.

    Args:
        output: the folder of prepared text, which holds the tokenizer.
        work: the folder of intermediate files, which holds the layout.
        options: how documents are processed.
        report: called with the progress, see `Report`.
        run: the number of the first shard, and of the shard after the last.

    Raises:
        UserError: a shard cannot be written, or the input has changed.
    """
    layout, folder = Layout.load(work), output / "tokenizer"
    tokenizer = _tokenizer(folder, (folder / "description.json").read_text(encoding="utf-8"))
    bounds = layout.bounds
    # A worker that died in this task may have made some of the shards.
    todo = {n for n in range(*run) if not _is_whole(output / shard_name(n, layout.num_shards))}
    if not todo:
        return
    known = _indexed(output)
    documents = layout.documents(bounds[min(todo)], bounds[max(todo) + 1], options)
    by_shard = itertools.groupby(documents, lambda item: bisect.bisect_right(bounds, item[0]) - 1)
    for number, items in by_shard:
        if number not in todo:
            continue
        copies = layout.copies(bounds[number], bounds[number + 1])
        kept = ((n, document) for n, document in items if n not in copies)
        path = output / shard_name(number, layout.num_shards)
        with os_errors(path, "written"):
            _make_shard(path, work, kept, tokenizer, options, report, known.get(path.name))


def _indexed(output: pathlib.Path) -> dict[str, dict]:
    """The checksums of each shard in the index of a folder that was complete once; none without a readable index."""
    try:
        return {shard["name"]: shard["sha256"] for shard in read_index(output)["shards"]}
    except UserError:
        return {}


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: pathlib.Path, description: str) -> Tokenizer:
    """Loads the tokenizer once per process, as that takes as long as tokenising a few MB.

    The description is part of the cache's key, for a folder that is deleted and made again with another tokenizer.
    """
    return load_tokenizer(folder)


def check_text(work: pathlib.Path, options: Options, report: Report, file: int) -> None:
    """A worker's task: reads an input file, by its number. Raises `UserError` if its text has changed since the first pass."""
    layout = Layout.load(work)
    first, stop = layout.first_document[file : file + 2].tolist()
    documents = characters = 0
    for _, document in layout.documents(first, stop, options):
        documents, characters = documents + 1, characters + len(document.text)
        if documents == _DOCUMENTS_OF_REPORT:
            report(documents, characters, 0)
            documents = characters = 0
    report(documents, characters, 0)


def _make_shard(
    path: pathlib.Path,
    work: pathlib.Path,
    documents: Iterable[tuple[int, Document]],
    tokenizer: Tokenizer,
    options: Options,
    report: Report,
    known: dict | None,
) -> None:
    # Two workers may make the same shard, if Dask took the first for dead, so each writes into a folder of its own.
    beside = work / f"{path.name}.{uuid.uuid4().hex}"
    beside.mkdir()
    try:
        with ShardWriter(beside, tokenizer.vocab_size) as writer:
            framed = _framed(documents, tokenizer, options, report)
            if options.packing == "published":
                framed = whole_blocks(framed, options.block_tokens)
            for tokens in framed:
                writer.add(tokens)
        # The work files, with the checksums of the text, are deleted when a folder is complete.
        if known is not None and _about(beside)["sha256"] != known:
            raise UserError(
                f"{path.name} is missing, and cannot be made again as it was, because the input has changed: delete "
                f"{path.parent}, or give another --output"
            )
        if path.exists() and not _is_whole(path):
            shutil.rmtree(path)
        try:
            beside.rename(path)
        except OSError:
            if not _is_whole(path):
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _framed(
    documents: Iterable[tuple[int, Document]],
    tokenizer: Tokenizer,
    options: Options,
    report: Report,
) -> Iterator[np.ndarray]:
    frame, counts, reported = options.frame, [0, 0, 0], time.monotonic()
    for number, document in documents:
        # The generator is seeded by the document's number, so that the pads do not depend on how shards are distributed.
        random = frame.front_fill == "random"
        front = frame.draw_front(np.random.default_rng([options.seed, number])) if random else 0
        tokens = frame.around(tokenizer.encode_array(document.text), front, tokenizer)
        counts = [counts[0] + 1, counts[1] + len(document.text), counts[2] + len(tokens)]
        if time.monotonic() - reported > _REPORT_EVERY:
            report(*counts)
            counts, reported = [0, 0, 0], time.monotonic()
        yield tokens
    report(*counts)


def write_index(
    output: pathlib.Path, layout: Layout, options: Options, tokenizer: Tokenizer
) -> dict:
    """Writes and returns the index, which completes the folder. It depends only on input, tokenizer and options.

    Raises `UserError` if a shard is damaged or there are no tokens.
    """
    names = [shard_name(number, layout.num_shards) for number in range(layout.num_shards)]
    shards = [{"name": name} | _about(output / name) for name in names]
    left_out: Counter = Counter()
    for file in layout.files:
        left_out.update(file["left_out"])
    num_copies = len(layout.copies(0, layout.bounds[-1]))
    if num_copies:
        left_out[DUPLICATES] = num_copies
    num_documents = sum(shard["documents"] for shard in shards)
    num_dropped = layout.bounds[-1] - num_copies - num_documents
    if num_dropped:
        left_out[REMAINDERS] = num_dropped
    index = {
        "format": FORMAT,
        "tokenizer": tokenizer.description,
        "options": options.identity,
        "documents": num_documents,
        "tokens": sum(shard["tokens"] for shard in shards),
        "left_out": dict(sorted(left_out.items())),
        "shards": shards,
    }
    if not index["tokens"]:
        raise UserError(
            f"{output}: no group of {PUBLISHED_GROUP} documents fills a block of --block_tokens={options.block_tokens}: "
            "give a smaller one, or --packing=all, and another --output"
        )
    write_atomically(output / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _about(shard: pathlib.Path) -> dict:
    """The content of `shard.json`. Raises `UserError` if it or `documents.npy` is missing or damaged."""
    try:
        about = read_checked_json(shard / SHARD)
        # A much larger file would take long to hash.
        header = (shard / DOCUMENTS).stat().st_size - 8 * (about["documents"] + 1)
        if not 0 < header < 2**16:
            raise ValueError(f"{DOCUMENTS} does not have the size that follows from {SHARD}")
        if sha256(shard / DOCUMENTS) != about["sha256"][DOCUMENTS]:
            raise ValueError(f"the checksum of {DOCUMENTS} is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shard} cannot be read ({error}): {_AGAIN}") from error
    return about
