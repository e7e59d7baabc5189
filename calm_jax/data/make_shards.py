"""Documents to shards of tokens: what a worker does, and the index over what all did."""

import bisect
import functools
import itertools
import json
import pathlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from calm_jax.data.blocks import PUBLISHED_GROUP, whole_blocks
from calm_jax.data.documents import Document
from calm_jax.data.inputs import Options
from calm_jax.data.plan import Layout, Report, write_json
from calm_jax.data.shards import (
    DOCUMENTS,
    FORMAT,
    INDEX,
    PAGE,
    PAGES,
    SHARD,
    ShardWriter,
    sha256,
)
from calm_jax.data.tokenizers import Tokenizer, load_tokenizer
from calm_jax.errors import UserError

_AGAIN = "delete this folder and give the same command again"
# Seconds between a worker's reports.
_REPORT_EVERY = 0.5


def shard_name(number: int, num_shards: int) -> str:
    return f"shard-{number:05}-of-{num_shards:05}"


def pending(output: pathlib.Path, num_shards: int) -> list[int]:
    """The shards that are not there yet."""
    return [n for n in range(num_shards) if not _is_whole(output / shard_name(n, num_shards))]


def _is_whole(shard: pathlib.Path) -> bool:
    try:
        about = _about(shard)
        # numpy compares the file's size with what its header says.
        pages = np.load(shard / PAGES, mmap_mode="r") if about["tokens"] else ()
    # A damaged header may make numpy raise anything.
    except Exception:
        return False
    return len(pages) == -(-about["tokens"] // PAGE)


def make_shards(
    output: pathlib.Path, work: pathlib.Path, options: Options, report: Report, run: tuple[int, int]
) -> None:
    """Makes a run of shards, from the first to the last (exclusive), in one reading of their text; each appears when it is whole.

    Raises `UserError` if one cannot be written.
    """
    layout, folder = Layout.load(work), output / "tokenizer"
    tokenizer = _tokenizer(folder, (folder / "description.json").read_text(encoding="utf-8"))
    bounds = layout.bounds
    # A worker that died has made some of them.
    todo = {n for n in range(*run) if not _is_whole(output / shard_name(n, layout.num_shards))}
    if not todo:
        return
    documents = layout.documents(bounds[min(todo)], bounds[max(todo) + 1], options)
    by_shard = itertools.groupby(documents, lambda item: bisect.bisect_right(bounds, item[0]) - 1)
    for number, items in by_shard:
        if number not in todo:
            continue
        copies = layout.copies(bounds[number], bounds[number + 1])
        kept = ((n, document) for n, document in items if n not in copies)
        path = output / shard_name(number, layout.num_shards)
        try:
            _make_shard(path, work, kept, tokenizer, options, report)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: pathlib.Path, description: str) -> Tokenizer:
    """Once for each process and description: reading it takes as long as tokenising a few MB."""
    return load_tokenizer(folder)


def _make_shard(
    path: pathlib.Path,
    work: pathlib.Path,
    documents: Iterable[tuple[int, Document]],
    tokenizer: Tokenizer,
    options: Options,
    report: Report,
) -> None:
    # Two may make the same shard, if one was given up for dead: each has its own folder.
    beside = pathlib.Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=work))
    beside.chmod(0o755)
    try:
        with ShardWriter(beside, tokenizer.vocab_size) as writer:
            framed = _framed(documents, tokenizer, options, report)
            if options.packing == "published":
                framed = whole_blocks(framed, options.block_tokens)
            for tokens in framed:
                writer.add(tokens)
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
        # By the document, not by which process makes it.
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
    """Writes what makes the folder a prepared text: nothing in it depends on when, where and by how many it was made."""
    names = [shard_name(number, layout.num_shards) for number in range(layout.num_shards)]
    shards = [{"name": name} | _about(output / name) for name in names]
    left_out: Counter = Counter()
    for file in layout.files:
        left_out.update(file["left_out"])
    num_copies = len(layout.copies(0, layout.bounds[-1]))
    if num_copies:
        left_out["equal to one before"] = num_copies
    num_documents = sum(shard["documents"] for shard in shards)
    num_dropped = layout.bounds[-1] - num_copies - num_documents
    if num_dropped:
        left_out["after the last whole block of 1,000"] = num_dropped
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
            f"{output}: no {PUBLISHED_GROUP} documents fill a block of --block_tokens={options.block_tokens}: give a smaller "
            "one, or --packing=all, and another --output"
        )
    write_json(output / INDEX, index)
    return index


def _about(shard: pathlib.Path) -> dict:
    """What a shard says of itself. Raises `UserError` if that does not fit what it is."""
    try:
        about = json.loads((shard / SHARD).read_text(encoding="utf-8"))
        bounds = (
            np.load(shard / DOCUMENTS)
            if sha256(shard / DOCUMENTS) == about["sha256"][DOCUMENTS]
            else [-1]
        )
        is_whole = (len(bounds) - 1, int(bounds[-1])) == (about["documents"], about["tokens"])
        is_whole &= set(about) == {"documents", "tokens", "sha256"} and set(about["sha256"]) == {
            PAGES,
            DOCUMENTS,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{shard} cannot be read ({error}): {_AGAIN}") from error
    if not is_whole:
        raise UserError(f"{shard} is damaged: {_AGAIN}")
    return about
