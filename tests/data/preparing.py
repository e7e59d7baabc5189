"""Prepared text without Dask for tests: files of texts, both passes, and naive loops that give the same tokens."""

import gzip
import itertools
import json
import pathlib
import random
import shutil

import pyarrow
import pyarrow.parquet
import zstandard

from calm_jax.data.prepare import make_shards, scan
from calm_jax.data.prepare.options import Input, Options
from calm_jax.data.prepare.scan import Layout
from calm_jax.data.shards import PreparedText
from calm_jax.data.tokenizers import ByteTokenizer, Tokenizer
from calm_jax.errors import UserError

BYTES = ByteTokenizer(b"")
LETTERS = "abcdefgh   \n\0éß日本😀\u2028"


def options(**changes) -> Options:
    defaults = {
        "text_field": "text",
        "on_bad_record": "raise",
        "min_characters": 0,
        "max_words": 0,
        "append_eos": True,
        "align_documents_to_chunks": False,
        "front_fill": "none",
        "chunk_size": 4,
        "deduplicate": False,
        "packing": "all",
        "block_tokens": 0,
        "seed": 0,
        "shard_characters": 2**30,
    }
    return Options(**(defaults | changes))


def no_report(*_) -> None:
    pass


def laid_out(folder, files, asked: Options, tokenizer: Tokenizer = BYTES) -> Layout:
    """The first pass of `preparation.prepare`, without a cluster."""
    work, inputs = folder / "work", Input.of([str(file) for file in files])
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer")
    groups = list(enumerate(inputs.groups()))
    for group in groups:
        scan.scan(work, inputs, asked, no_report, group)
    found, digests = scan.scanned(work, range(len(groups)))
    layout = Layout(work, inputs, found, [])
    if not layout.first_document[-1]:
        raise UserError("--input holds no text")
    parts = scan.num_parts(int(layout.first_document[-1])) if asked.deduplicate else 0
    for part in range(parts):
        scan.find_copies(work, digests, parts, part)
    copies_N = scan.merge_copies(work, layout.first_document, parts)
    layout = Layout(work, inputs, found, scan.shard_bounds(found, asked, copies_N))
    layout.save()
    return layout


def each_alone(numbers: list[int]) -> list[tuple[int, int]]:
    return [(number, number + 1) for number in numbers]


def all_in_one(numbers: list[int]) -> list[tuple[int, int]]:
    return [(numbers[0], numbers[-1] + 1)]


def middle_first(numbers: list[int]) -> list[tuple[int, int]]:
    first, middle, last = numbers[0], numbers[len(numbers) // 2], numbers[-1] + 1
    return [(middle, last)] + ([(first, middle)] if first < middle else [])


def prepared(folder, files, tokenizer=BYTES, runs=each_alone, **changes) -> PreparedText:
    """`preparation.prepare` without a cluster; `runs` divides shards into tasks."""
    asked = options(**changes)
    layout = laid_out(folder, files, asked, tokenizer)
    todo = make_shards.pending(folder, layout.num_shards)
    for run in runs(todo) if todo else []:
        make_shards.make_shards(folder, layout.work, asked, no_report, run)
    make_shards.write_index(folder, layout, asked, tokenizer)
    shutil.rmtree(layout.work)
    return PreparedText(folder)


def everything(text: PreparedText) -> list[int]:
    return text.tokens(0, text.num_tokens).tolist()


def contents(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def random_texts(seed: int, count: int, longest: int = 200) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, longest))) for _ in range(count)]


def json_lines(texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def frames(data: bytes, size: int) -> bytes:
    """zstd in frames of `size` bytes, as parallel compressors write them."""
    pack_ = zstandard.ZstdCompressor().compress
    return b"".join(pack_(data[i : i + size]) for i in range(0, len(data), size))


def write_parquet(path, texts) -> None:
    rows = [{"id": 1, "text": text} for text in texts]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


def write_mixed(folder, texts) -> list[pathlib.Path]:
    """Writes the texts, in order, to files of every format."""
    folder.mkdir()
    step = -(-len(texts) // 5)
    parts = [texts[i : i + step] for i in range(0, 4 * step, step)]
    files = [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet")]
    files[0].write_bytes(json_lines(parts[0]))
    files[1].write_bytes(gzip.compress(json_lines(parts[1])))
    files[2].write_bytes(frames(json_lines(parts[2]), 500))
    write_parquet(files[3], parts[3])
    for number, text in enumerate(texts[4 * step :]):
        files.append(folder / f"e{number:03}.txt")
        files[-1].write_bytes(text.encode())
    return files


def naive_documents(texts, asked: Options) -> list[str]:
    """The documents that a preparation keeps: pieces of texts that are long enough, without copies."""
    left, seen = [], set()
    for text in texts:
        if not text or len(text) < asked.min_characters:
            continue
        words, size = text.split(" "), asked.max_words or 10**9
        for first in range(0, len(words), size):
            piece = " ".join(words[first : first + size])
            if not (asked.deduplicate and piece in seen):
                left.append(piece)
            seen.add(piece)
    return left


def naive_tokens(documents, asked: Options, tokenizer=BYTES) -> list[list[int]]:
    framed = []
    for text in documents:
        ids = [tokenizer.bos_id, *tokenizer.encode(text), *[tokenizer.eos_id] * asked.append_eos]
        while asked.align_documents_to_chunks and len(ids) % asked.chunk_size:
            ids.append(tokenizer.pad_id)
        framed.append(ids)
    return framed


def naive_published(framed, block: int) -> list[list[int]]:
    blocks = []
    for first in range(0, len(framed), 1000):
        group = list(itertools.chain(*framed[first : first + 1000]))
        blocks += [group[i : i + block] for i in range(0, len(group) - block + 1, block)]
    return blocks


def flat(framed) -> list[int]:
    return list(itertools.chain(*framed))


class Characters(Tokenizer):
    """Token ids are code points; the model is the vocabulary's size, in decimal."""

    kind = "characters"
    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, model: bytes):
        super().__init__(model)
        self.vocab_size = int(model)

    def encode_batch(self, texts):
        return [[ord(character) for character in text] for text in texts]

    def _decode_text(self, ids):
        return "".join(map(chr, ids))
