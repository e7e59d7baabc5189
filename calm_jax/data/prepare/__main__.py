"""Prepares text for training: documents to shards of tokens, by many processes on one machine or several.

    python -m calm_jax.data.prepare --input='pile/*.jsonl.zst' --tokenizer=tokenizer.model --output=prepared/pile

The first of two passes counts documents and finds bad records and, with --deduplicate, copies; the second tokenises. After
an interruption the same command continues, on any number of workers, and the result is the same to the byte.
"""

import os
from typing import Any

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.files import is_unicode, local_path
from calm_jax.cli.flags import parse_flags
from calm_jax.cli.progress import counted
from calm_jax.data.files import find_files
from calm_jax.data.prepare.options import KEY, Options
from calm_jax.data.prepare.preparation import prepare
from calm_jax.data.shards import left_out
from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.errors import UserError

_INPUT = flags.DEFINE_string(
    "input", "", "comma-separated globs of .txt, .jsonl, .json (and .gz, .zst of these), .parquet"
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "Llama 3's tokenizer.model, a byte-level tokenizer.json, a SentencePiece model, a workdir, or 'bytes'",
)
_OUTPUT = flags.DEFINE_string("output", "", "folder to write")
_WORKERS = flags.DEFINE_integer("workers", 0, "worker processes; 0 for one per core")
_SCHEDULER = flags.DEFINE_string(
    "scheduler", "", "address of a running Dask cluster that sees input and output, tcp://HOST:8786"
)
# The fields of `Options`.
_OPTIONS = (
    flags.DEFINE_string("text_field", "text", "field of a record that holds the text"),
    flags.DEFINE_string(
        "on_bad_record", "raise", "'raise' (names file and line) or 'skip' (counted)"
    ),
    flags.DEFINE_integer("min_characters", 0, "shorter documents are left out"),
    flags.DEFINE_integer(
        "max_words", 0, "longer documents are cut into pieces of this many words (published: 10000)"
    ),
    flags.DEFINE_bool(
        "append_eos", True, "eos after each document (published: only for the autoencoder)"
    ),
    flags.DEFINE_bool(
        "align_documents_to_chunks",
        False,
        "pads after each document up to whole chunks (published: only for the autoencoder)",
    ),
    flags.DEFINE_string(
        "front_fill", "none", "'random': 0 to chunk_size-1 pads before each document"
    ),
    flags.DEFINE_integer(
        "chunk_size", 4, "K, tokens per chunk, for --align_documents_to_chunks and --front_fill"
    ),
    flags.DEFINE_bool("deduplicate", False, "leave out documents equal to an earlier one"),
    flags.DEFINE_string(
        "packing",
        "all",
        "'all' keeps every token; 'published' drops the tokens after the last whole block of every 1000 documents",
    ),
    flags.DEFINE_integer("block_tokens", 0, "tokens of a block, for --packing=published"),
    flags.DEFINE_integer("seed", 0, "seed of --front_fill=random"),
    flags.DEFINE_integer("shard_characters", 2**30, "characters of text in a shard"),
)


@command
def main(argv: list[str]) -> None:
    for name, value in (
        (KEY, _INPUT.value),
        ("--tokenizer", _TOKENIZER.value),
        ("--output", _OUTPUT.value),
    ):
        if not value:
            raise UserError(f"give {name}")
    output = local_path(_OUTPUT.value, "--output")
    if not is_unicode(os.path.abspath(output)):
        raise UserError(
            f"--output={_OUTPUT.value!r} is in a folder whose name is not valid UTF-8, which Dask cannot send: give another one"
        )
    if _WORKERS.value < 0 or (_WORKERS.value and _SCHEDULER.value):
        raise UserError(
            f"--workers={_WORKERS.value} must not be negative, and cannot be combined with --scheduler"
        )
    given: dict[str, Any] = {flag.name: flag.value for flag in _OPTIONS}
    options = Options(**given)
    tokenizer, _ = open_tokenizer(_TOKENIZER.value)
    files = find_files(_INPUT.value, KEY)
    index = prepare(files, tokenizer, output, options, _WORKERS.value, _SCHEDULER.value)
    for reason, count in left_out(index).items():
        what = (
            f"the rest of {counted(count, 'file')}"
            if reason.endswith("file")
            else counted(count, "document")
        )
        print(f"left out: {what}: {reason}")
    print(
        f"{output}: {counted(index['documents'], 'document')}, {counted(index['tokens'], 'token')} in {counted(len(index['shards']), 'shard')}"
    )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
