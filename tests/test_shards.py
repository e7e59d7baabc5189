"""Prepared text, without Dask: the tokens of a naive loop over the documents, whatever the shards; damage is an error."""

import collections
import gzip
import itertools
import json
import os
import pathlib
import random
import shutil
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken.load
import zstandard

from calm_jax.data import blocks as blocks_lib
from calm_jax.data import inputs as inputs_lib
from calm_jax.data import make_shards, plan, tokenizers
from calm_jax.data.blocks import MASKED, BlockConfig, document_blocks, pack
from calm_jax.data.documents import Document, Reading, digest_of, pieces, read_documents
from calm_jax.data.inputs import Input, Options
from calm_jax.data.plan import Layout
from calm_jax.data.shards import PAGE, PreparedText, page_type, prepared_blocks
from calm_jax.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerConfig,
    make_tokenizer,
)
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
    """The first pass of `prepare.prepare`, without a cluster."""
    work, inputs = folder / "work", Input.of([str(file) for file in files])
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer")
    groups = range(len(inputs.groups()))
    for group in groups:
        plan.scan(work, inputs, asked, no_report, group)
    found = [
        file for group in groups for file in json.loads(plan.scan_path(work, group).read_text())
    ]
    layout = Layout(work, inputs, found, [])
    if not layout.first_document[-1]:
        raise UserError("--input holds no text")
    parts = plan.num_parts(int(layout.first_document[-1])) if asked.deduplicate else 0
    for part in range(parts):
        plan.find_copies(work, parts, part)
    copies_N = plan.merge_copies(work, layout.first_document, parts)
    layout = Layout(work, inputs, found, plan.shard_bounds(found, asked, copies_N))
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
    """What `prepare.prepare` does, without a cluster."""
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
    """Texts in files of every format, in their order."""
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
    """What is left of texts: of those that are long enough the pieces, without copies."""
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


# --- Tokens are those of the documents ----------------------------------------------------------

FRAMES = {
    "plain": {},
    "no eos": {"append_eos": False},
    "chunks of 4": {"align_documents_to_chunks": True},
    "chunks of 3, no eos": {
        "align_documents_to_chunks": True,
        "chunk_size": 3,
        "append_eos": False,
    },
    "pieces, no copies": {"max_words": 3, "deduplicate": True, "min_characters": 5},
}


@pytest.mark.parametrize("shard_characters", [1, 1000, 10**9])
@pytest.mark.parametrize("frame", FRAMES)
def test_all_shards_together_are_the_documents_one_behind_the_other(
    tmp_path, frame, shard_characters
):
    texts = random_texts(1, 30)
    texts = texts + texts[::-3]
    changes = FRAMES[frame] | {"shard_characters": shard_characters}
    text = prepared(tmp_path / "out", write_mixed(tmp_path / "in", texts), **changes)
    expected = naive_tokens(naive_documents(texts, options(**changes)), options(**changes))
    assert everything(text) == flat(expected)
    assert [tokens.tolist() for tokens in text.documents(1)] == expected
    assert text.num_documents == len(expected) and text.num_tokens == len(flat(expected))
    assert (text.num_shards == 1) == (shard_characters == 10**9)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
@pytest.mark.parametrize("chunk_size", [3, 4])
@pytest.mark.parametrize("align", [False, True])
def test_random_pads_before_a_document_are_its_own_and_follow_from_the_seed(
    tmp_path, seed, chunk_size, align
):
    texts = random_texts(2, 60, 30)
    files = write_mixed(tmp_path / "in", texts)
    changes = {
        "front_fill": "random",
        "chunk_size": chunk_size,
        "align_documents_to_chunks": align,
        "seed": seed,
    }
    text = prepared(tmp_path / "out", files, shard_characters=500, **changes)
    fronts = []
    for tokens, document in zip(text.documents(1), texts, strict=True):
        front = tokens.tolist().index(BYTES.bos_id)
        whole = [BYTES.pad_id] * front + [BYTES.bos_id, *BYTES.encode(document), BYTES.eos_id]
        whole += [BYTES.pad_id] * (-len(whole) % chunk_size if align else 0)
        assert tokens.tolist() == whole
        fronts.append(front)
    assert set(fronts) == set(range(chunk_size))
    assert fronts[:20] != fronts[20:40]
    one_shard = prepared(tmp_path / "one", files, **changes)
    assert everything(one_shard) == everything(text)
    other_seed = prepared(tmp_path / "other", files, **(changes | {"seed": 5}))
    assert everything(other_seed) != everything(text)


@pytest.mark.parametrize("runs", [all_in_one, middle_first])
@pytest.mark.parametrize("packing", [{}, {"packing": "published", "block_tokens": 7}])
def test_grouping_shards_in_runs_changes_no_byte(tmp_path, monkeypatch, runs, packing):
    monkeypatch.setattr(plan, "PUBLISHED_GROUP", 50)
    monkeypatch.setattr(blocks_lib, "PUBLISHED_GROUP", 50)
    texts = random_texts(3, 400, 20)
    files = write_mixed(tmp_path / "in", [*texts, *random_texts(4, 8)])
    changes = packing | {"shard_characters": 600, "deduplicate": True, "front_fill": "random"}
    alone = prepared(tmp_path / "alone", files, **changes)
    assert alone.num_shards > 2
    prepared(tmp_path / "runs", files, runs=runs, **changes)
    assert contents(tmp_path / "runs") == contents(tmp_path / "alone")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_file_of_any_format_can_be_begun_at_any_shard(tmp_path, name):
    texts, path = random_texts(5, 40), tmp_path / name
    if name.endswith("parquet"):
        write_parquet(path, texts)
    else:
        pack_ = {".gz": gzip.compress, ".zst": lambda data: frames(data, 300)}
        path.write_bytes(pack_.get(path.suffix, bytes)(json_lines(texts)))

    def backwards(numbers):
        return each_alone(numbers)[::-1]

    text = prepared(tmp_path / "out", [path], runs=backwards, shard_characters=1)
    assert text.num_shards == len(texts)
    assert everything(text) == flat(naive_tokens(texts, options()))


def test_files_without_a_document_change_nothing(tmp_path):
    texts = random_texts(6, 12)
    files = write_mixed(tmp_path / "in", texts)
    for number in range(3):
        (tmp_path / f"{number}.jsonl").write_bytes(b"\n" * number)
    empty = [tmp_path / f"{number}.jsonl" for number in range(3)]
    text = prepared(
        tmp_path / "out",
        [empty[0], *files[:2], empty[1], *files[2:], empty[2]],
        shard_characters=300,
        deduplicate=True,
    )
    assert everything(text) == flat(naive_tokens(texts, options()))


def test_sentencepiece_text_comes_back(tmp_path):
    tokenizer = make_tokenizer(TokenizerConfig("sentencepiece", "", 380), random_texts(7, 200))
    texts = random_texts(8, 50)
    files = write_mixed(tmp_path / "in", texts)
    text = prepared(tmp_path / "out", files, tokenizer, shard_characters=1000)
    assert everything(text) == flat(naive_tokens(texts, options(), tokenizer))
    assert text.tokenizer.fingerprint == tokenizer.fingerprint
    assert [text.tokenizer.decode(tokens) for tokens in text.documents(1)] == texts


# --- Published packing --------------------------------------------------------------------------


@pytest.mark.parametrize("block, deduplicate", [(64, False), (8, True), (1000, True)])
def test_published_packing_equals_the_rule_block_by_block(tmp_path, block, deduplicate):
    rng = random.Random(block)
    texts = random_texts(block, 3600, 12)
    texts += rng.choices(texts, k=500) + random_texts(10, 700, 3)
    changes = {
        "packing": "published",
        "block_tokens": block,
        "deduplicate": deduplicate,
        "max_words": 2,
        "min_characters": 2,
        "shard_characters": 5000,
        "align_documents_to_chunks": True,
    }
    text = prepared(tmp_path / "out", write_mixed(tmp_path / "in", texts[:-300]), **changes)
    asked = options(**changes)
    kept = naive_documents(texts[:-300], asked)
    expected = naive_published(naive_tokens(kept, asked), block)
    assert text.num_shards > 2 and len(kept) > 3500
    blocks = prepared_blocks(text, block, "published")
    assert len(blocks) == len(expected)
    for ours, theirs in zip(blocks, expected, strict=True):
        assert ours["tokens"].tolist() == theirs
    assert everything(text) == flat(expected)


@pytest.mark.parametrize("seed", range(12))
def test_published_shards_begin_with_a_group_whatever_is_left_out(tmp_path, seed, monkeypatch):
    """Copies anywhere, also at the borders of groups and files, also so many that a group goes on for files."""
    monkeypatch.setattr(plan, "PUBLISHED_GROUP", 10)
    monkeypatch.setattr(blocks_lib, "PUBLISHED_GROUP", 10)
    rng = random.Random(seed)
    words = [str(number) for number in range(rng.choice([30, 100, 400]))]
    texts = [rng.choice(words) for _ in range(rng.choice([25, 200]))]
    cuts = sorted(rng.choices(range(len(texts)), k=5))
    files = []
    for number, (a, b) in enumerate(itertools.pairwise([0, *cuts, len(texts)])):
        files.append(tmp_path / f"{number}.jsonl")
        files[-1].write_bytes(json_lines(texts[a:b]))
    changes = {
        "packing": "published",
        "block_tokens": rng.choice([2, 3, 9]),
        "deduplicate": True,
        "shard_characters": rng.choice([1, 7, 30]),
    }
    text = prepared(tmp_path / "out", files, runs=rng.choice([each_alone, all_in_one]), **changes)
    framed = naive_tokens(dict.fromkeys(texts), options())
    groups = [flat(framed[i : i + 10]) for i in range(0, len(framed), 10)]
    block = changes["block_tokens"]
    assert everything(text) == flat(group[: len(group) // block * block] for group in groups)


# --- Pieces and copies --------------------------------------------------------------------------


@pytest.mark.parametrize("max_words", [1, 2, 3, 10])
def test_pieces_joined_by_spaces_are_the_text(max_words):
    rng = random.Random(max_words)
    for _ in range(200):
        text = "".join(rng.choices("ab \n\u00a0", k=rng.randint(1, 60)))
        cut = [piece.text for piece in pieces(Document("name", text), max_words)]
        assert " ".join(cut) == text
        assert all(piece.count(" ") == max_words - 1 for piece in cut[:-1])
        assert cut[-1].count(" ") < max_words


@pytest.mark.parametrize(
    "words, sizes", [(4, [4]), (5, [5]), (6, [5, 1]), (10, [5, 5]), (11, [5, 5, 1])]
)
def test_a_text_of_just_max_words_is_whole_and_one_more_word_is_a_piece(words, sizes):
    document = Document("name", " ".join(["word"] * words))
    assert [len(piece.text.split(" ")) for piece in pieces(document, 5)] == sizes
    assert {piece.name for piece in pieces(document, 5)} == {"name"}
    assert pieces(document, 0) == [document]


@pytest.mark.parametrize("partition, segment", [(10**6, 10**6), (50, 7), (9, 50), (10, 2)])
def test_the_first_of_equal_documents_stays(tmp_path, monkeypatch, partition, segment):
    monkeypatch.setattr(plan, "_PARTITION", partition)
    monkeypatch.setattr(plan, "_SEGMENT", segment)
    monkeypatch.setattr(inputs_lib, "_GROUP_FILES", 3)
    rng = random.Random(0)
    texts = random_texts(11, 40, 30)
    texts = rng.choices(texts, k=50) + texts + rng.choices(texts, k=60)
    files = write_mixed(tmp_path / "in", texts)
    text = prepared(tmp_path / "out", files, deduplicate=True, shard_characters=400)
    expected = list(dict.fromkeys(texts))
    assert [BYTES.decode(tokens) for tokens in text.documents(1)] == expected
    assert text.index["left_out"] == {"equal to one before": len(texts) - len(expected)}
    assert text.num_documents == len(expected)


def test_digests_on_the_borders_of_parts_are_looked_at_once(tmp_path):
    """With 3 and 4 parts, whose borders are no whole parts of 2**64 or just that."""
    for num_parts in (1, 2, 3, 4, 7):
        borders = {2**64 * part // num_parts + d for part in range(num_parts + 1) for d in (-1, 0)}
        rows = [(key, 5, n) for key in borders if 0 <= key < 2**64 for n in (3, 1, 2)]
        work = tmp_path / str(num_parts)
        work.mkdir()
        np.save(work / "digests-00000-00000.npy", np.array(sorted(rows), np.uint64))
        for part in range(num_parts):
            plan.find_copies(work, num_parts, part)
        found = [np.load(plan.copies_path(work, part)).tolist() for part in range(num_parts)]
        assert sorted(flat(found)) == sorted([2, 3] * (len(rows) // 3))


def test_prompt_and_text_are_told_apart_by_the_digest():
    documents = [
        Document("", "ab", "c"),
        Document("", "b", "ca"),
        Document("", "cab"),
        Document("", "abc"),
    ]
    assert len({digest_of(document) for document in documents}) == 4
    assert digest_of(Document("x", "ab", "c")) == digest_of(Document("y", "ab", "c"))


# --- Reading ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> tuple[PreparedText, list[list[int]]]:
    """A text of several shards of several pages, and its documents."""
    folder = tmp_path_factory.mktemp("pages")
    texts = random_texts(12, 300, 90) + random_texts(13, 4, 3000) + random_texts(14, 100, 5)
    text = prepared(
        folder / "out", write_mixed(folder / "in", texts), shard_characters=2500, chunk_size=3
    )
    assert text.num_shards > 5 and max(s["tokens"] for s in text.index["shards"]) > 2 * PAGE
    return text, naive_tokens(texts, options())


def test_any_part_of_the_text_can_be_read(pages):
    text, documents = pages
    expected, rng = np.asarray(flat(documents)), random.Random(0)
    first_S = np.cumsum([0, *(shard["tokens"] for shard in text.index["shards"])]).tolist()
    for _ in range(1000):
        first = rng.choice([rng.randrange(text.num_tokens), rng.choice(first_S[:-1])])
        first = min(max(0, first + rng.choice([0, 0, -1, 1, PAGE - 1, PAGE])), text.num_tokens - 1)
        size = min(rng.choice([1, 2, 100, PAGE, PAGE + 1, 9000]), text.num_tokens - first)
        tokens = text.tokens(first, size)
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens, expected[first : first + size])


def test_no_tokens_at_all_can_be_read_anywhere(pages):
    for first in (0, 100, pages[0].num_tokens):
        assert pages[0].tokens(first, 0).tolist() == []


@pytest.mark.parametrize("stride", [1, 2, 7, 10**9])
def test_every_so_many_documents_can_be_read(pages, stride):
    text, documents = pages
    assert [tokens.tolist() for tokens in text.documents(stride)] == documents[::stride]


def test_starts_are_those_of_the_whole_text(pages):
    text, documents = pages
    bounds = [text.bounds(number) for number in range(text.num_shards)]
    starts = np.concatenate([of_shard[:-1] for of_shard in bounds])
    np.testing.assert_array_equal(starts, np.cumsum([0, *map(len, documents)])[:-1])
    assert [int(of_shard[-1]) for of_shard in bounds[:-1]] == [
        int(of_shard[0]) for of_shard in bounds[1:]
    ]
    assert bounds[-1][-1] == text.num_tokens


@pytest.mark.parametrize("block", [1, 5, 64, 1500])
def test_windows_are_the_text_cut_up(pages, block):
    text, documents = pages
    blocks, expected = prepared_blocks(text, block, "windows"), np.asarray(flat(documents))
    assert len(blocks) == len(expected) // block
    for index in range(0, len(blocks), 1 + 97 // block):
        window = expected[index * block : (index + 1) * block]
        np.testing.assert_array_equal(blocks[index]["tokens"], window)
        np.testing.assert_array_equal(blocks[index]["targets"], window)
    np.testing.assert_array_equal(
        blocks.targets(np.array([1, 0])), expected[: 2 * block].reshape(2, -1)[::-1]
    )


def naive_blocks(documents, block: int) -> list[list[list[int]]]:
    """Blocks of whole documents, and of parts of those that are longer than a block."""
    blocks, left = [], 0
    for document in documents:
        for first in range(0, len(document), block):
            part = document[first : first + block]
            if len(part) > left:
                blocks.append([])
                left = block
            blocks[-1].append(part)
            left -= len(part)
    return blocks


@pytest.mark.parametrize("block", [4, 7, 50, 300, 4000])
def test_document_blocks_hold_every_document_whole_and_once(pages, block):
    text, documents = pages
    blocks = prepared_blocks(text, block, "documents")
    by_shard, place = [], 0
    for shard in text.index["shards"]:
        by_shard += naive_blocks(documents[place : place + shard["documents"]], block)
        place += shard["documents"]
    assert len(blocks) == len(by_shard)
    for item, parts in zip(blocks, by_shard, strict=True):
        tokens = flat(parts)
        filler = block - len(tokens)
        assert item["tokens"].tolist() == tokens + [BYTES.pad_id] * filler
        assert item["targets"].tolist() == tokens + [MASKED] * filler
    targets = blocks.targets(np.arange(len(blocks)))
    assert targets[targets != MASKED].tolist() == flat(documents)


def blocks_of(lengths, block: int) -> list[list[int]]:
    """The numbered tokens of each block of documents of these lengths."""
    starts_D = np.cumsum([0, *lengths[:-1]])
    first_N, size_N = document_blocks(starts_D, int(sum(lengths)), block)
    return [list(range(first, first + size)) for first, size in zip(first_N, size_N, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_document_blocks_are_those_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    block = int(rng.integers(1, 40))
    length_D = rng.integers(1, rng.choice([2, 10, 100]), size=rng.integers(60, 120))
    length_D[rng.random(len(length_D)) < 0.2] = block
    numbered = np.split(np.arange(length_D.sum()), np.cumsum(length_D)[:-1])
    expected = naive_blocks([part.tolist() for part in numbered], block)
    assert blocks_of(length_D, block) == [flat(parts) for parts in expected]


def test_documents_that_are_one_block_are_one():
    assert blocks_of([5], 5) == blocks_of([5], 9) == [[0, 1, 2, 3, 4]]
    assert blocks_of([2, 3], 5) == blocks_of([2, 3], 8) == [[0, 1, 2, 3, 4]]
    assert blocks_of([5], 4) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("block", [8, 60])
@pytest.mark.parametrize("packing", ["documents", "published"])
def test_packing_in_memory_equals_loops(packing, block, align):
    texts = random_texts(15, 2300, 9) + random_texts(16, 20, 100)
    config = BlockConfig(block, packing, True, align, "none", False)
    encoded = [np.asarray(BYTES.encode(text), np.int32) for text in texts]
    framed = naive_tokens(texts, options(align_documents_to_chunks=align))
    blocks = pack(encoded, BYTES, config, 4, 0, False, "the text")
    if packing == "published":
        assert blocks.tokens.tolist() == naive_published(framed, block)
        assert (blocks.num_valid == block).all()
        return
    expected = [flat(parts) for parts in naive_blocks(framed, block)]
    assert blocks.num_valid.tolist() == [len(tokens) for tokens in expected]
    for tokens, theirs in zip(blocks.tokens.tolist(), expected, strict=True):
        assert tokens == theirs + [BYTES.pad_id] * (block - len(theirs))


class Characters(Tokenizer):
    """Code points; the model is the size of the vocabulary."""

    kind = "characters"
    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, model: bytes):
        super().__init__(model)
        self.vocab_size = int(model)

    def encode_batch(self, texts):
        return [[ord(character) for character in text] for text in texts]

    def _decode_text(self, ids):
        return "".join(map(chr, ids))


@pytest.mark.parametrize("vocab_size, token_bytes", [(65536, 2), (65537, 4), (2**20, 4)])
def test_tokens_are_as_small_as_the_vocabulary_allows(
    tmp_path, monkeypatch, vocab_size, token_bytes
):
    monkeypatch.setitem(tokenizers.KINDS, Characters.kind, Characters)
    tokenizer = Characters(str(vocab_size).encode())
    texts = ["".join(map(chr, [vocab_size - 1, 3, vocab_size - 2, 0x7FFF, 0x8000])) * 400, "abc"]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    text = prepared(tmp_path / "out", [tmp_path / "a.jsonl"], tokenizer)
    assert everything(text) == flat(naive_tokens(texts, options(), tokenizer))
    pages = np.load(tmp_path / "out" / "shard-00000-of-00001" / "pages.npy")
    assert pages.dtype == page_type(vocab_size) and pages.dtype.itemsize == PAGE * token_bytes + 4
    assert len(pages) == -(-text.num_tokens // PAGE)


# --- Damage -------------------------------------------------------------------------------------


def read_all(folder) -> list[int]:
    """Everything that can be read of a prepared text, and its tokens."""
    text = PreparedText(folder)
    tokens = everything(text)
    _ = text.tokenizer
    for number in range(text.num_shards):
        text.bounds(number)
        text.check(number)
    return tokens


def damage(path, rng: random.Random) -> None:
    data = path.read_bytes()
    kind = rng.choice(["flip", "flip", "flip", "cut", "longer", "gone", "folder"])
    if kind in ("gone", "folder") or (kind in ("flip", "cut") and not data):
        path.unlink()
        if kind != "gone":
            path.mkdir()
        return
    if kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind == "longer":
        data += rng.randbytes(rng.choice([1, 8, 500, 2052, 3000]))
    else:
        bad = bytearray(data)
        # The beginning is what is parsed.
        longest = rng.choice([len(bad), min(len(bad), 128)])
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(longest)] = rng.choice(
                [rng.randrange(256), rng.choice(b"0123456789<>i8{}[],\"' e.-")]
            )
        data = bytes(bad)
    path.write_bytes(data)


def mended(path, data: bytes) -> None:
    if path.is_dir():
        path.rmdir()
    path.write_bytes(data)


DAMAGED = [
    "index.json",
    "tokenizer/model",
    "tokenizer/description.json",
    "shard-00001-of-00003/pages.npy",
    "shard-00001-of-00003/documents.npy",
    "shard-00002-of-00003/shard.json",
]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[pathlib.Path, list[int]]:
    """A folder of three shards, and its tokens."""
    folder = tmp_path_factory.mktemp("small")
    tokenizer = make_tokenizer(TokenizerConfig("sentencepiece", "", 380), random_texts(7, 200))
    files = write_mixed(folder / "in", random_texts(17, 45))
    text = prepared(folder / "out", files, tokenizer, shard_characters=1700)
    assert text.num_shards == 3
    return folder / "out", everything(text)


def outcomes(folder, name: str, times: int, read, tokens: list[int]) -> collections.Counter:
    """How often each outcome comes of reading with the file damaged: a name, or the error that should not be."""
    path, rng = folder / name, random.Random(name)
    whole = path.read_bytes()
    found: collections.Counter = collections.Counter()
    for _ in range(times):
        damage(path, rng)
        try:
            found["right" if read() == tokens else "wrong tokens"] += 1
        except UserError as error:
            is_good = str(folder) in str(error) and "\n" not in str(error)
            found["refused" if is_good else f"a message without a path: {error}"] += 1
        except Exception as error:
            found[f"{type(error).__name__}: {error}"] += 1
        finally:
            mended(path, whole)
    return found


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_an_error_or_changes_nothing(small, tmp_path, name):
    folder = tmp_path / "out"
    shutil.copytree(small[0], folder)
    found = outcomes(folder, name, 150, lambda: read_all(folder), small[1])
    assert found.keys() <= {"right", "refused"}
    assert found["refused"] > 100 or name.endswith("shard.json")


def test_a_damaged_shard_json_is_an_error_or_changes_nothing_where_the_index_is_made(
    small, tmp_path
):
    """The only time that it is read."""
    folder = tmp_path / "out"
    shutil.copytree(small[0], folder)
    layout = Layout(folder / "work", Input((), ()), [], list(range(4)))
    layout.work.mkdir()
    np.save(layout.work / "copies.npy", np.zeros(0, int))
    tokenizer = PreparedText(folder).tokenizer

    def read():
        make_shards.write_index(folder, layout, options(), tokenizer)
        return read_all(folder)

    name = "shard-00001-of-00003/shard.json"
    assert outcomes(folder, name, 300, read, small[1]).keys() <= {"right", "refused"}
    path = folder / name
    about = json.loads(path.read_text())
    for other in ({"tokens": about["tokens"] - 1}, {"tokens": about["tokens"] + 1}):
        path.write_text(json.dumps(about | other))
        with pytest.raises(UserError):
            assert read() == small[1]


def test_files_that_vanish_or_are_no_files_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["short"]))
    text = prepared(tmp_path / "out", [tmp_path / "a.jsonl"])
    shard = tmp_path / "out" / "shard-00000-of-00001"
    for name in ("pages.npy", "documents.npy"):
        whole = (shard / name).read_bytes()
        (shard / name).unlink()
        with pytest.raises(UserError, match="shard-00000-of-00001: "):
            _ = text.tokens(0, 1), text.bounds(0)
        (shard / name).mkdir()
        with pytest.raises(UserError, match="shard-00000-of-00001: "):
            read_all(tmp_path / "out")
        mended(shard / name, whole)
    assert read_all(tmp_path / "out") == everything(text)


def test_a_flipped_bit_within_pages_is_never_read(small):
    folder, _ = small
    path, rng = folder / "shard-00001-of-00003" / "pages.npy", random.Random(0)
    whole = path.read_bytes()
    header = len(whole) % page_type(380).itemsize
    for _ in range(200):
        bad = bytearray(whole)
        bad[rng.randrange(header, len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(UserError, match="checksum of page"):
            everything(PreparedText(folder))
    path.write_bytes(whole)


@pytest.mark.parametrize(
    "vocab_size, token", [(259, 259), (259, 65535), (70000, 70000), (70000, 2**32 - 1)]
)
def test_a_token_outside_the_vocabulary_is_refused_though_its_checksum_is_right(
    tmp_path, monkeypatch, vocab_size, token
):
    monkeypatch.setitem(tokenizers.KINDS, Characters.kind, Characters)
    (tmp_path / "a.jsonl").write_bytes(json_lines(["abc" * 700]))
    prepared(tmp_path / "out", [tmp_path / "a.jsonl"], Characters(str(vocab_size).encode()))
    path = tmp_path / "out" / "shard-00000-of-00001" / "pages.npy"
    pages = np.load(path)
    pages["tokens"][1, 3] = token
    pages["crc32"][1] = zlib.crc32(pages["tokens"][1])
    np.save(path, pages)
    text = PreparedText(tmp_path / "out")
    assert text.tokens(0, PAGE).max() == ord("c")
    with pytest.raises(
        UserError, match=r"shard-00000-of-00001: token -?\d+ is outside the vocabulary"
    ):
        text.tokens(PAGE, 10)


def test_a_tokenizer_that_is_not_the_one_of_the_tokens_is_refused(small, tmp_path):
    shutil.copytree(small[0], tmp_path / "out")
    other = make_tokenizer(TokenizerConfig("sentencepiece", "", 380), random_texts(18, 200))
    assert isinstance(other, SentencePieceTokenizer)
    other.save(tmp_path / "out" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer"):
        _ = PreparedText(tmp_path / "out").tokenizer


def cut_by_damage(data: bytes, suffix: str, rng: random.Random) -> bytes:
    """Packed data, and after it bytes that make no sense."""
    if suffix == ".zst":
        return frames(data, 9000) + rng.randbytes(100)
    packer = zlib.compressobj(wbits=31)
    # Where a block begins, of a type that there is none of.
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH) + b"\7" * 100


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_with_damage_gives_the_documents_before_it(tmp_path, suffix):
    """From whichever place in it reading begins."""
    rng = random.Random(0)
    for number in range(3):
        path = tmp_path / f"{number}.jsonl{suffix}"
        texts = random_texts(number, rng.randrange(800, 1500))
        path.write_bytes(cut_by_damage(json_lines(texts), suffix, rng))
        reading, left_out = Reading("text", on_bad_record="skip"), collections.Counter()
        expected = [item.text for item in read_documents([str(path)], "", reading, left_out)]
        assert left_out == {"damaged file": 1} and expected == texts[: len(expected)]
        text = prepared(
            tmp_path / str(number), [path], on_bad_record="skip", shard_characters=15000
        )
        assert [BYTES.decode(tokens) for tokens in text.documents(1)] == expected
        assert text.index["left_out"] == left_out


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_what_can_be_unpacked_before_damage_is_kept(tmp_path, suffix):
    """Python's gzip gives up to 8 KiB at a time, or nothing of them."""
    texts, path = random_texts(24, 300), tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(cut_by_damage(json_lines(texts), suffix, random.Random(0)))
    reading, left_out = Reading("text", on_bad_record="skip"), collections.Counter()
    found = [item.text for item in read_documents([str(path)], "", reading, left_out)]
    assert found == texts[: len(found)]
    assert len(json_lines(texts[len(found) :])) <= (8192 if suffix == ".gz" else 0)


# --- Going on -----------------------------------------------------------------------------------


def test_a_shard_that_is_missing_is_made_again_to_the_same_bytes(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(20, 60))
    changes = {"shard_characters": 900, "deduplicate": True, "front_fill": "random"}
    whole = prepared(tmp_path / "out", files, **changes)
    expected, num_shards = contents(whole.folder), whole.num_shards
    assert num_shards > 4
    for missing in ([0], [num_shards - 1], [1, 2, num_shards - 1], range(num_shards)):
        shards = [whole.folder / make_shards.shard_name(n, num_shards) for n in range(num_shards)]
        kept = {shard: shard.stat().st_mtime_ns for shard in shards}
        for number in missing:
            shutil.rmtree(shards[number])
            del kept[shards[number]]
        (whole.folder / "index.json").unlink()
        assert make_shards.pending(whole.folder, num_shards) == list(missing)
        prepared(whole.folder, files, **changes)
        assert contents(whole.folder) == expected
        assert all(shard.stat().st_mtime_ns == time for shard, time in kept.items())


def test_a_half_written_shard_is_not_taken_for_a_whole_one(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(21, 60))
    whole = prepared(tmp_path / "whole", files, shard_characters=900)
    asked = options(shard_characters=900)
    layout = laid_out(tmp_path / "out", files, asked)
    first = whole.folder / make_shards.shard_name(0, whole.num_shards)
    for tag in ("other.1", f"{os.uname().nodename}.{os.getpid()}"):
        half = layout.work / f"{first.name}.{tag}"
        shutil.copytree(first, half)
        (half / "pages.npy").write_bytes((first / "pages.npy").read_bytes()[:-100])
    assert make_shards.pending(tmp_path / "out", layout.num_shards) == list(range(whole.num_shards))
    prepared(tmp_path / "out", files, shard_characters=900)
    assert contents(tmp_path / "out") == contents(whole.folder)


def test_a_worker_that_ends_within_a_shard_leaves_none(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(22, 60))
    asked = options(shard_characters=10**9)
    layout = laid_out(tmp_path / "out", files, asked)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shards.make_shards(tmp_path / "out", layout.work, asked, fail, (0, 1))
    assert make_shards.pending(tmp_path / "out", 1) == [0]
    assert not list(layout.work.glob("shard-*"))


def test_a_shard_that_another_worker_has_made_stays(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(23, 20))
    asked = options()
    layout = laid_out(tmp_path / "out", files, asked)
    make_shards.make_shards(tmp_path / "out", layout.work, asked, no_report, (0, 1))
    before = contents(tmp_path / "out")
    make_shards.make_shards(tmp_path / "out", layout.work, asked, no_report, (0, 1))
    assert contents(tmp_path / "out") == before


# --- WikiText -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wikitext() -> tuple[pathlib.Path, Tokenizer, list[list[int]]]:
    """The file, Llama 3's tokenizer, and by tiktoken alone the tokens of each piece of 10,000 words."""
    if "CALM_DATA" not in os.environ:
        pytest.skip("needs CALM_DATA, a folder with llama3_tokenizer.model and WikiText")
    folder = pathlib.Path(os.environ["CALM_DATA"])
    file, model = folder / "wikitext_document_level-test.json", folder / "llama3_tokenizer.model"
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = tiktoken.load.load_tiktoken_bpe(str(model))
    bpe = tiktoken.Encoding("llama3", pat_str=words, mergeable_ranks=ranks, special_tokens={})
    texts = [json.loads(line)["text"] for line in file.open(encoding="utf-8")]
    encoded = bpe.encode_ordinary_batch(naive_documents(texts, options(max_words=10_000)))
    assert len(encoded) > len(texts) == 62
    return file, make_tokenizer(TokenizerConfig("llama3", str(model), 0), ()), encoded


@pytest.mark.parametrize(
    "eos, chunk, block, size, first, last",
    [
        (True, 4, 2048, 288768, [128000, 284, 8563, 426], [1202, 17444, 439, 264]),
        (False, 1, 8192, 286720, [128000, 284, 8563, 426], [54410, 389, 37102, 454]),
    ],
)
def test_wikitext_equals_what_tiktoken_makes_of_it(
    tmp_path, wikitext, eos, chunk, block, size, first, last
):
    """The autoencoder's text and the language model's."""
    file, tokenizer, encoded = wikitext
    bos_id, eos_id, pad_id = 128000, 128001, 128256
    framed = [[bos_id, *ids, *[eos_id] * eos] for ids in encoded]
    framed = [ids + [pad_id] * (-len(ids) % chunk) for ids in framed]
    text = prepared(
        tmp_path / "out",
        [file],
        tokenizer,
        packing="published",
        block_tokens=block,
        append_eos=eos,
        align_documents_to_chunks=chunk > 1,
        max_words=10_000,
    )
    expected = np.asarray(naive_published(framed, block))
    blocks = prepared_blocks(text, block, "published")
    assert text.num_tokens == expected.size == len(blocks) * block == size
    for tokens, item in zip(expected, blocks, strict=True):
        np.testing.assert_array_equal(item["tokens"], tokens)
    assert (text.tokens(0, 4).tolist(), text.tokens(size - 4, 4).tolist()) == (first, last)
