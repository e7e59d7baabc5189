"""Prepares text for training: documents to shards of tokens, by as many processes and machines as there are.

    python -m calm_jax.data.prepare --input='pile/*.jsonl.zst' --tokenizer=tokenizer.model --output=prepared/pile

Two passes: the first finds documents, bad records and, with --deduplicate, copies, before any long work; the second
tokenises. A run that was killed goes on where it was with the same command, on any number of workers, to the same bytes.
"""

import contextlib
import fcntl
import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags

from calm_jax.command import command, parse_flags
from calm_jax.data import make_shards, plan
from calm_jax.data.cluster import Cluster, Progress
from calm_jax.data.files import find_files
from calm_jax.data.inputs import KEY, Input, Options
from calm_jax.data.plan import Layout
from calm_jax.data.shards import INDEX, PreparedText
from calm_jax.data.tokenizers import Tokenizer, open_tokenizer
from calm_jax.errors import UserError

_INPUT = flags.DEFINE_string(
    "input", "", "comma-separated globs of .txt, .jsonl, .json (and .gz, .zst of these), .parquet"
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "Llama 3's tokenizer.model or tokenizer.json, a SentencePiece model, or 'bytes'",
)
_OUTPUT = flags.DEFINE_string("output", "", "folder to make")
_WORKERS = flags.DEFINE_integer("workers", 0, "processes; as many as there are cores unless given")
_SCHEDULER = flags.DEFINE_string(
    "scheduler", "", "address of a running Dask cluster that sees input and output, tcp://HOST:8786"
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "field of a record that holds the text")
_ON_BAD_RECORD = flags.DEFINE_string(
    "on_bad_record", "raise", "'raise' (names file and line) or 'skip' (counted)"
)
_MIN_CHARACTERS = flags.DEFINE_integer("min_characters", 0, "shorter documents are left out")
_MAX_WORDS = flags.DEFINE_integer(
    "max_words", 0, "longer documents are cut into pieces of so many words (published: 10000)"
)
_APPEND_EOS = flags.DEFINE_bool(
    "append_eos", True, "eos after each document (published: for the autoencoder alone)"
)
_ALIGN = flags.DEFINE_bool(
    "align_documents_to_chunks",
    False,
    "pads after each document up to whole chunks (published: for the autoencoder alone)",
)
_FRONT_FILL = flags.DEFINE_string(
    "front_fill", "none", "'random': 0 to chunk_size-1 pads before each document"
)
_CHUNK_SIZE = flags.DEFINE_integer("chunk_size", 4, "K, for the two above")
_DEDUPLICATE = flags.DEFINE_bool("deduplicate", False, "leave out documents equal to one before")
_PACKING = flags.DEFINE_string(
    "packing",
    "all",
    "'all' tokens, or 'published': of every 1000 documents, what does not fill a block is dropped",
)
_BLOCK_TOKENS = flags.DEFINE_integer("block_tokens", 0, "of --packing=published")
_SEED = flags.DEFINE_integer("seed", 0, "of --front_fill=random")
_SHARD_CHARACTERS = flags.DEFINE_integer("shard_characters", 2**30, "text of a shard")


# Shards that a task makes at most.
_MOST_SHARDS = 8


@contextlib.contextmanager
def _locked(output: pathlib.Path) -> Iterator[None]:
    """Holds the folder for this process. Raises `UserError` if another one does."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(output / "lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"--output={output}: another process is preparing it") from None
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
        yield


def _refuse_foreign(output: pathlib.Path) -> None:
    """Makes the folder. Raises `UserError` if there is something else in it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in output.iterdir()}
    except OSError as error:
        raise UserError(f"--output={output} cannot be made: {error.strerror}") from error
    # A run that was killed as it began has left these.
    others = {name for name in names if name != "lock" and not name.startswith("inputs.json.")}
    if others and "inputs.json" not in names:
        raise UserError(f"--output={output} is not empty and no prepared text: give another folder")


def _clean(work: pathlib.Path) -> None:
    """Removes what killed workers left half-made, and ends those that are left of an earlier run."""
    for path in work.glob("run-*"):
        path.unlink()
    for path in work.glob("shard-*"):
        shutil.rmtree(path, ignore_errors=True)


def _differences(output: pathlib.Path, about: dict) -> list[tuple[str, Any, Any]]:
    """`(what, then, now)` of everything in which the folder was begun with something else."""
    path = output / "inputs.json"
    if not path.exists():
        return []
    try:
        then, now = _flat(json.loads(path.read_text(encoding="utf-8"))), _flat(about)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}): give another --output") from error
    pairs = [(key, then.get(key), now.get(key)) for key in now | then]
    return [(key, a, b) for key, a, b in pairs if a != b]


def _begin(output: pathlib.Path, about: dict) -> None:
    """Writes down what the folder is made of. Raises `UserError` if it was begun with something else."""
    other = _differences(output, about)
    # Otherwise it came to nothing: a wrong field's name, say.
    if other and any((*output.glob("shard-*"), *output.glob("work/scan-*.json"))):
        key, then, now = other[0]
        raise UserError(
            f"--output={output} was begun with {key}={then!r}, not {now!r}: give another folder, or delete it"
        )
    if other:
        shutil.rmtree(output / "work", ignore_errors=True)
    plan.write_json(output / "inputs.json", about)


def _flat(about: dict) -> dict:
    files = {f"input {n}": file for n, file in enumerate(about["files"])}
    states = {
        f"the content of {file}": s for file, s in zip(about["files"], about["states"], strict=True)
    }
    return about["options"] | {"tokenizer": about["tokenizer"]} | files | states


def _is_done(output: pathlib.Path) -> bool:
    """Whether nothing is missing; says what is, where something was."""
    if not (output / INDEX).exists():
        return False
    try:
        _ = PreparedText(output).tokenizer
    except UserError:
        print(f"{output} is not whole any more: making what is missing", flush=True)
        return False
    return True


def _runs(layout: Layout, numbers: Sequence[int], num_workers: int) -> list[tuple[int, int]]:
    """Shards that one task makes, first and last (exclusive).

    One by one where reading can begin anywhere. A packed file has to be read from its beginning: there a task makes
    several, in one reading, but not so many that workers have nothing to do.
    """
    longest = min(_MOST_SHARDS, -(-len(numbers) // (2 * num_workers)))
    runs: list[tuple[int, int]] = []
    for number in numbers:
        follows = runs and runs[-1][1] == number and not layout.can_begin_at(layout.bounds[number])
        if follows and number - runs[-1][0] < longest:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _make_layout(cluster: Cluster, work: pathlib.Path, inputs: Input, options: Options) -> Layout:
    """The first pass, what is not done of it yet."""
    if (work / "layout.json").exists():
        return Layout.load(work)
    groups = range(len(inputs.groups()))
    todo = [group for group in groups if not plan.scan_path(work, group).exists()]
    progress = Progress("reading", 0)
    cluster.run(functools.partial(plan.scan, work, inputs, options, cluster.report), todo, progress)
    files = [file for group in groups for file in plan.read_json(plan.scan_path(work, group))]
    layout = Layout(work, inputs, files, [])
    num_documents, num_parts = int(layout.first_document[-1]), 0
    if not num_documents:
        raise UserError(f"{KEY} holds no text")
    if options.deduplicate:
        num_parts = plan.num_parts(num_documents)
        todo = [part for part in range(num_parts) if not plan.copies_path(work, part).exists()]
        cluster.run(functools.partial(plan.find_copies, work, num_parts), todo)
    copies_N = plan.merge_copies(work, layout.first_document, num_parts)
    layout = Layout(work, inputs, files, plan.shard_bounds(files, options, copies_N))
    layout.save()
    return layout


def prepare(
    files: Sequence[str],
    tokenizer: Tokenizer,
    output: pathlib.Path,
    options: Options,
    workers: int,
    scheduler: str = "",
) -> dict:
    """Prepares files into a folder, or goes on where an earlier call was; returns the index."""
    inputs = Input.of(files)
    about = {
        "options": options.identity,
        "tokenizer": tokenizer.fingerprint,
        "files": list(inputs.files),
        "states": list(inputs.states),
    }
    output = output.absolute()
    _refuse_foreign(output)
    work = output / "work"
    if not _differences(output, about) and _is_done(output):
        print(f"{output} is prepared, there is nothing to do")
        shutil.rmtree(work, ignore_errors=True)
        return PreparedText(output).index
    with _locked(output):
        _begin(output, about)
        try:
            tokenizer.save(output / "tokenizer")
            work.mkdir(exist_ok=True)
            _clean(work)
        except OSError as error:
            raise UserError(f"{output} cannot be written: {error.strerror or error}") from error
        with Cluster(work, workers, scheduler) as cluster:
            layout = _make_layout(cluster, work, inputs, options)
            todo = make_shards.pending(output, layout.num_shards)
            progress = Progress("tokenising", sum(map(layout.num_kept, todo)))
            call = functools.partial(make_shards.make_shards, output, work, options, cluster.report)
            cluster.run(call, _runs(layout, todo, cluster.num_workers), progress)
        index = make_shards.write_index(output, layout, options, tokenizer)
        shutil.rmtree(work, ignore_errors=True)
        return index


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}")
    for name, value in (
        (KEY, _INPUT.value),
        ("--tokenizer", _TOKENIZER.value),
        ("--output", _OUTPUT.value),
    ):
        if not value:
            raise UserError(f"give {name}")
    if "://" in _OUTPUT.value:
        raise UserError(f"--output={_OUTPUT.value} must be a folder of a file system")
    if _WORKERS.value < 0 or (_WORKERS.value and _SCHEDULER.value):
        raise UserError(
            f"--workers={_WORKERS.value} must be at least 1, and is for a cluster of this machine's, without --scheduler"
        )
    options = Options(
        text_field=_TEXT_FIELD.value,
        on_bad_record=_ON_BAD_RECORD.value,
        min_characters=_MIN_CHARACTERS.value,
        max_words=_MAX_WORDS.value,
        append_eos=_APPEND_EOS.value,
        align_documents_to_chunks=_ALIGN.value,
        front_fill=_FRONT_FILL.value,
        chunk_size=_CHUNK_SIZE.value,
        deduplicate=_DEDUPLICATE.value,
        packing=_PACKING.value,
        block_tokens=_BLOCK_TOKENS.value,
        seed=_SEED.value,
        shard_characters=_SHARD_CHARACTERS.value,
    )
    tokenizer, _ = open_tokenizer(_TOKENIZER.value)
    files = find_files(_INPUT.value, KEY)
    workers = _WORKERS.value or len(os.sched_getaffinity(0))
    output = pathlib.Path(_OUTPUT.value)
    index = prepare(files, tokenizer, output, options, workers, _SCHEDULER.value)
    for reason, count in index["left_out"].items():
        what = f"the rest of {count:,} files" if reason.endswith("file") else f"{count:,} documents"
        print(f"left out: {what}: {reason}")
    print(
        f"{output}: {index['documents']:,} documents, {index['tokens']:,} tokens in {len(index['shards'])} shards"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
