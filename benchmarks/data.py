"""Measures how fast text is prepared as shards, and how fast batches are read from shards.

    python -m benchmarks.data --text=wikitext.jsonl --tokenizer=tokenizer.model --folder=DIR [--megabytes=1000]

Preparing should cost little more than tokenizing: in the same run, as many processes tokenize the same text from memory and
do nothing else (the bare tokenizer). Reading should never slow down training: a host of 8 accelerators consumes far fewer
than 20 million tokens a second. For comparison, the same blocks are read from ArrayRecord, one block in each record.
"""

import functools
import json
import multiprocessing
import os
import pathlib
import resource
import shutil
import statistics
import time
from typing import Any

import array_record.python.array_record_module as array_record
import grain
import numpy as np
import zstandard
from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import os_errors
from calm_jax.cli.flags import parse_flags
from calm_jax.data.loader import TrainingText, training_batches
from calm_jax.data.packing import BlockSource
from calm_jax.data.prepare.options import Options
from calm_jax.data.prepare.preparation import prepare
from calm_jax.data.shards import PreparedText, prepared_blocks
from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.errors import UserError

_TEXT = flags.DEFINE_string(
    "text", "", ".jsonl file with a field 'text', repeated up to --megabytes"
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "Llama 3's tokenizer.model or tokenizer.json, a SentencePiece model, or 'bytes'",
)
_FOLDER = flags.DEFINE_string(
    "folder", "", "where to write text and shards; both are deleted afterwards"
)
_MEGABYTES = flags.DEFINE_integer("megabytes", 1000, "megabytes of text to prepare", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "runs of which medians are taken", lower_bound=1)
_FILES = 4
_BATCH = 64
# Characters of text for each process of the bare tokenizer.
_BARE_CHARACTERS = 50e6


def _tokenize(tokenizer: str, texts: list[str], ready: Any, go: Any, counts: Any) -> None:
    """Tokenizes all texts once `go` is set, and puts the number of tokens into `counts`."""
    encode = open_tokenizer(tokenizer)[0].encode_array
    encode(texts[0])
    ready.release()
    go.wait()
    counts.put(sum(len(encode(text)) for text in texts))


def _bare_rate(tokenizer: str, texts: list[str], workers: int) -> float:
    """Tokens a second of `workers` processes that only tokenize."""
    context = multiprocessing.get_context("spawn")
    ready, go, counts = context.Semaphore(0), context.Event(), context.Queue()
    processes = [
        context.Process(target=_tokenize, args=(tokenizer, texts, ready, go, counts))
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    began = time.monotonic()
    go.set()
    total = sum(counts.get() for _ in processes)
    seconds = time.monotonic() - began
    for process in processes:
        process.join()
    return total / seconds


def _write_text(folder: pathlib.Path, texts: list[str], megabytes: int) -> None:
    """Writes files of equal size, compressed as the Pile's files are."""
    size = sum(len(text.encode()) for text in texts)
    repeats = max(1, round(megabytes * 1e6 / _FILES / size))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=19)
    compressor = zstandard.ZstdCompressor(compression_params=window)
    for number in range(_FILES):
        with (
            open(folder / f"{number}.jsonl.zst", "wb") as file,
            # The compression window is too small to see that the text is repeated.
            compressor.stream_writer(file) as packed,
        ):
            for _ in range(repeats):
                packed.write(lines)


def _rate(rows: grain.MapDataset, block_tokens: int, threads: int) -> float:
    """Tokens a second of reading batches."""
    batches = training_batches(rows, _BATCH, 0, range(_BATCH), threads)
    next(batches)
    count, began = 0, time.monotonic()
    while time.monotonic() - began < 3:
        next(batches)
        count += _BATCH * block_tokens
    return count / (time.monotonic() - began)


class _ArrayRecordBlocks:
    """The blocks of a data source in an ArrayRecord file, one block in each record."""

    def __init__(self, path: pathlib.Path, blocks: BlockSource):
        writer = array_record.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for index in range(len(blocks)):
            writer.write(blocks[index]["tokens"].astype("<u4").tobytes())
        writer.close()
        self._reader = array_record.ArrayRecordReader(
            str(path), options="readahead_buffer_size:0", file_reader_buffer_size=2**16
        )
        self._size = len(blocks)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.frombuffer(self._reader.read([int(index)])[0], "<u4").astype(np.int32)
        return {"tokens": tokens, "targets": tokens}


def _measure_preparing(folder: pathlib.Path, texts: list[str], tokenizer: str) -> pathlib.Path:
    """Prints the rates of preparing; returns the folder of the last prepared text."""
    workers = len(os.sched_getaffinity(0))
    some = texts * max(1, round(_BARE_CHARACTERS / sum(map(len, texts))))
    bare_rate = functools.partial(_bare_rate, tokenizer, some, workers)
    bares, rates, shares = [], [], []
    for repeat in range(_REPEATS.value):
        before = bare_rate()
        output = folder / f"prepared-{repeat}"
        files = [str(folder / f"{number}.jsonl.zst") for number in range(_FILES)]
        options = Options("text", "raise", 0, 0, True, False, "none", 4, False, "all", 0, 0, 2**24)
        began = time.monotonic()
        index = prepare(files, open_tokenizer(tokenizer)[0], output, options, workers)
        rate = index["tokens"] / (time.monotonic() - began)
        # The mean of before and after, as the load of other work on the machine varies.
        bare = (before + bare_rate()) / 2
        bares.append(bare)
        rates.append(rate)
        shares.append(rate / bare)
        print(f"  {bare / 1e6:.2f} Mtok/s bare, {rate / 1e6:.2f} prepared", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(
        f"preparing, {workers} workers: {statistics.median(rates) / 1e6:.2f} Mtok/s prepared, bare tokenizer "
        f"{statistics.median(bares) / 1e6:.2f}, share {statistics.median(shares):.0%} (medians of {len(rates)}); peak of a process {peak:.0f} MiB"
    )
    return output


def _measure_reading(folder: pathlib.Path, prepared: pathlib.Path) -> None:
    """Prints the rates of reading batches, from shards and from ArrayRecord."""
    text = PreparedText(prepared)
    for block_tokens in (2048, 8192):
        shards = prepared_blocks(text, block_tokens, "windows")
        # Reading uses only the length and the items of a BlockSource: the ArrayRecord source has nothing else.
        sources: dict[str, Any] = {
            "shards": shards,
            "shards, whole documents": prepared_blocks(text, block_tokens, "documents"),
            "ArrayRecord": _ArrayRecordBlocks(folder / f"{block_tokens}.ar", shards),
        }
        for name, source in sources.items():
            for threads in (0, 16):
                read = functools.partial(
                    _rate, TrainingText([source], ()).rows(0), block_tokens, threads
                )
                rates = [read() for _ in range(_REPEATS.value)]
                print(
                    f"reading blocks of {block_tokens}, {name}, {threads} threads: "
                    f"{statistics.median(rates) / 1e6:.0f} Mtok/s (median of {len(rates)})",
                    flush=True,
                )


@command
def main(argv: list[str]) -> None:
    if not (_TEXT.value and _FOLDER.value and _TOKENIZER.value):
        raise UserError("give --text=FILE, --tokenizer=FILE and --folder=DIR")
    open_tokenizer(_TOKENIZER.value)
    try:
        lines = pathlib.Path(_TEXT.value).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--text={_TEXT.value} has no records with a text: {error!r}") from error
    if not any(texts):
        raise UserError(f"--text={_TEXT.value} holds no text")
    folder = pathlib.Path(_FOLDER.value) / "calm-jax-data-benchmark"
    with os_errors(folder, "made"):
        folder.mkdir(parents=True)
    try:
        _write_text(folder, texts, _MEGABYTES.value)
        _measure_reading(folder, _measure_preparing(folder, texts, _TOKENIZER.value))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
