"""Documents to shards of tokens: what a worker does, and the index over what all did."""

import bisect
import functools
import itertools
import json
import os
import pathlib
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from calm_jax.data.blocks import PUBLISHED_GROUP
from calm_jax.data.documents import Document
from calm_jax.data.plan import Layout, Options, Report, write_json
from calm_jax.data.shards import FORMAT, INDEX, SHARD, ShardWriter
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError

# Seconds between a worker's reports.
_REPORT_EVERY = 0.5


def shard_name(number: int, num_shards: int) -> str:
    return f"shard-{number:05}-of-{num_shards:05}"


def pending(output: pathlib.Path, num_shards: int) -> list[int]:
    """The shards that are not there yet."""
    return [n for n in range(num_shards) if not (output / shard_name(n, num_shards)).exists()]


def make_shards(
    output: pathlib.Path, work: pathlib.Path, options: Options, report: Report, run: tuple[int, int]
) -> None:
    """Makes a run of shards, from the first to the last (exclusive), in one reading of their text; each appears when it is whole.

    Raises `UserError` if one cannot be written.
    """
    layout, tokenizer = Layout.load(work), _tokenizer(output / "tokenizer")
    (first, stop), bounds = run, layout.bounds
    documents = layout.documents(bounds[first], bounds[stop], options)
    by_shard = itertools.groupby(documents, lambda item: bisect.bisect_right(bounds, item[0]) - 1)
    for number, items in by_shard:
        copies = layout.copies(bounds[number], bounds[number + 1])
        kept = ((n, document) for n, document in items if n not in copies)
        path = output / shard_name(number, layout.num_shards)
        try:
            _make_shard(path, work, kept, tokenizer, options, report)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Once for each process: reading it takes as long as tokenising a few MB."""
    return load_tokenizer(folder)


def _make_shard(
    path: pathlib.Path,
    work: pathlib.Path,
    documents: Iterable[tuple[int, Document]],
    tokenizer: Tokenizer,
    options: Options,
    report: Report,
) -> None:
    # Two processes may make the same shard, if one was given up for dead.
    beside = work / f"{path.name}.{socket.gethostname()}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        with ShardWriter(beside, tokenizer.vocab_size) as writer:
            framed = _framed(documents, tokenizer, options, report)
            if options.packing == "published":
                framed = _whole_blocks(framed, options.block_tokens)
            for tokens in framed:
                writer.add(tokens)
        try:
            beside.rename(path)
        except OSError:
            if not path.exists():
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
        # By the document, not by which process makes it.
        front = frame.draw_front(np.random.default_rng([options.seed, number]))
        tokens = frame.around(tokenizer.encode_array(document.text), front, tokenizer)
        counts = [counts[0] + 1, counts[1] + len(document.text), counts[2] + len(tokens)]
        if time.monotonic() - reported > _REPORT_EVERY:
            report(*counts)
            counts, reported = [0, 0, 0], time.monotonic()
        yield tokens
    report(*counts)


def _whole_blocks(framed: Iterator[np.ndarray], block_tokens: int) -> Iterator[np.ndarray]:
    """Of every group of documents what fills blocks; the last document of a group may be cut off."""
    while group := list(itertools.islice(framed, PUBLISHED_GROUP)):
        left = sum(map(len, group)) // block_tokens * block_tokens
        for tokens in group:
            if left:
                yield tokens[:left]
                left -= min(left, len(tokens))


def write_index(
    output: pathlib.Path, layout: Layout, options: Options, tokenizer: Tokenizer
) -> dict:
    """Writes what makes the folder a prepared text: nothing in it depends on when, where and by how many it was made."""
    shards = []
    for number in range(layout.num_shards):
        name = shard_name(number, layout.num_shards)
        path = output / name / SHARD
        try:
            shards.append({"name": name} | json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}): delete its folder and give the same command again"
            ) from error
    left_out: Counter = Counter()
    for file in layout.files:
        left_out.update(file["left_out"])
    num_copies = len(layout.copies(0, layout.bounds[-1]))
    if num_copies:
        left_out["equal to one before"] = num_copies
    index = {
        "format": FORMAT,
        "tokenizer": tokenizer.description,
        "options": options.identity,
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "left_out": dict(sorted(left_out.items())),
        "shards": shards,
    }
    write_json(output / INDEX, index)
    return index
