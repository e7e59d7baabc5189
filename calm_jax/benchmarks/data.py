"""How fast text becomes shards, and shards become batches.

    python -m calm_jax.benchmarks.data --text=wikitext.jsonl --tokenizer=tokenizer.model --folder=DIR [--megabytes=1000]

Preparing should cost what the tokenizer costs: the same text is tokenised by as many processes that hold it in memory
and do nothing else, in the same run. Reading should never hold back a training: a host of 8 accelerators takes far fewer
than 20 million tokens a second. ArrayRecord, with a block a record, is read beside it.
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

import array_record.python.array_record_module as array_record
import grain
import numpy as np
import zstandard
from absl import app, flags

from calm_jax.command import command, parse_flags
from calm_jax.data import prepare
from calm_jax.data.inputs import Options
from calm_jax.data.pipeline import TrainingText, training_batches
from calm_jax.data.shards import PreparedText, prepared_blocks
from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.errors import UserError

_TEXT = flags.DEFINE_string("text", "", ".jsonl with a field 'text', repeated up to --megabytes")
_FOLDER = flags.DEFINE_string("folder", "", "where to put text and shards; both are deleted again")
_MEGABYTES = flags.DEFINE_integer("megabytes", 1000, "of text")
_REPEATS = flags.DEFINE_integer("repeats", 3, "medians are of so many")
_FILES = 4
_BATCH = 64
# Of text for each process of the bare tokenizer.
_BARE_CHARACTERS = 50e6


def _tokenise(tokenizer: str, texts: list[str], ready, go, counts) -> None:
    encode = open_tokenizer(tokenizer)[0].encode_array
    encode(texts[0])
    ready.release()
    go.wait()
    counts.put(sum(len(encode(text)) for text in texts))


def _bare_rate(tokenizer: str, texts: list[str], workers: int) -> float:
    """Tokens a second of processes that do nothing else."""
    context = multiprocessing.get_context("spawn")
    ready, go, counts = context.Semaphore(0), context.Event(), context.Queue()
    processes = [
        context.Process(target=_tokenise, args=(tokenizer, texts, ready, go, counts))
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
    """Files of the same size, packed as the Pile's are."""
    size = sum(len(text.encode()) for text in texts)
    repeats = max(1, round(megabytes * 1e6 / _FILES / size))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=19)
    compressor = zstandard.ZstdCompressor(compression_params=window)
    for number in range(_FILES):
        with (
            open(folder / f"{number}.jsonl.zst", "wb") as file,
            # It must not see that the text is repeated.
            compressor.stream_writer(file) as packed,
        ):
            for _ in range(repeats):
                packed.write(lines)


def _rate(rows: grain.MapDataset, block_tokens: int, threads: int) -> float:
    """Tokens a second in batches."""
    batches = training_batches(rows, _BATCH, 0, range(_BATCH), threads)
    next(batches)
    count, began = 0, time.monotonic()
    while time.monotonic() - began < 3:
        next(batches)
        count += _BATCH * block_tokens
    return count / (time.monotonic() - began)


class _ArrayRecordBlocks:
    """The same blocks, a record each."""

    def __init__(self, path: pathlib.Path, blocks):
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
        index = prepare.prepare(files, open_tokenizer(tokenizer)[0], output, options, workers)
        rate = index["tokens"] / (time.monotonic() - began)
        # Other work on the machine comes and goes: the mean of before and after.
        bare = (before + bare_rate()) / 2
        bares.append(bare)
        rates.append(rate)
        shares.append(rate / bare)
        print(f"  {bare / 1e6:.2f} Mtok/s bare, {rate / 1e6:.2f} prepared", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    print(
        f"preparing, {workers} workers: {statistics.median(rates) / 1e6:.2f} Mtok/s with everything, bare tokenizer "
        f"{statistics.median(bares) / 1e6:.2f}, share {statistics.median(shares):.0%} (medians of {len(rates)}); peak of a process {peak:.0f} MiB"
    )
    return output


def _measure_reading(folder: pathlib.Path, prepared: pathlib.Path) -> None:
    text = PreparedText(prepared)
    for block_tokens in (2048, 8192):
        sources = {
            "shards": prepared_blocks(text, block_tokens, "windows"),
            "shards, whole documents": prepared_blocks(text, block_tokens, "documents"),
        }
        sources["ArrayRecord"] = _ArrayRecordBlocks(
            folder / f"{block_tokens}.ar", sources["shards"]
        )
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
    if not (_TEXT.value and _FOLDER.value and flags.FLAGS.tokenizer):
        raise UserError("give --text=FILE, --tokenizer=FILE and --folder=DIR")
    folder = pathlib.Path(_FOLDER.value) / "calm-jax-data-benchmark"
    folder.mkdir(parents=True)
    try:
        lines = pathlib.Path(_TEXT.value).read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        _write_text(folder, texts, _MEGABYTES.value)
        _measure_reading(folder, _measure_preparing(folder, texts, flags.FLAGS.tokenizer))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
