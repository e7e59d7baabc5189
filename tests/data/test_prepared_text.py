"""Reading of prepared text: any range of tokens, documents, and blocks of either packing."""

import random

import numpy as np
import pytest

from calm_jax.data import tokenizers
from calm_jax.data.packing import MASKED, BlockConfig, document_blocks, pack
from calm_jax.data.shards import PAGE, PreparedText, page_type, prepared_blocks
from tests.data.preparing import (
    BYTES,
    Characters,
    everything,
    flat,
    json_lines,
    naive_published,
    naive_tokens,
    options,
    prepared,
    random_texts,
    write_mixed,
)


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


def test_zero_tokens_can_be_read_anywhere(pages):
    for first in (0, 100, pages[0].num_tokens):
        assert pages[0].tokens(first, 0).tolist() == []


@pytest.mark.parametrize("stride", [1, 2, 7, 10**9])
def test_every_nth_document_can_be_read(pages, stride):
    text, documents = pages
    assert [tokens.tolist() for tokens in text.documents(stride)] == documents[::stride]


def test_bounds_of_shards_count_from_the_beginning_of_the_text(pages):
    text, documents = pages
    bounds = [text.bounds(number) for number in range(text.num_shards)]
    starts = np.concatenate([of_shard[:-1] for of_shard in bounds])
    np.testing.assert_array_equal(starts, np.cumsum([0, *map(len, documents)])[:-1])
    assert [int(of_shard[-1]) for of_shard in bounds[:-1]] == [
        int(of_shard[0]) for of_shard in bounds[1:]
    ]
    assert bounds[-1][-1] == text.num_tokens


@pytest.mark.parametrize("block", [1, 5, 64, 1500])
def test_windows_are_consecutive_parts_of_the_text(pages, block):
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
    """Blocks of whole documents, and of parts of documents that are longer than a block."""
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
    """The places of each block's tokens, for documents of these lengths."""
    starts_D = np.cumsum([0, *lengths[:-1]])
    first_N, size_N = document_blocks(starts_D, int(sum(lengths)), block)
    return [list(range(first, first + size)) for first, size in zip(first_N, size_N, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_document_blocks_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    block = int(rng.integers(1, 40))
    length_D = rng.integers(1, rng.choice([2, 10, 100]), size=rng.integers(60, 120))
    length_D[rng.random(len(length_D)) < 0.2] = block
    numbered = np.split(np.arange(length_D.sum()), np.cumsum(length_D)[:-1])
    expected = naive_blocks([part.tolist() for part in numbered], block)
    assert blocks_of(length_D, block) == [flat(parts) for parts in expected]


def test_document_blocks_by_hand():
    assert blocks_of([5], 5) == blocks_of([5], 9) == [[0, 1, 2, 3, 4]]
    assert blocks_of([2, 3], 5) == blocks_of([2, 3], 8) == [[0, 1, 2, 3, 4]]
    assert blocks_of([5], 4) == [[0, 1, 2, 3], [4]]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("block", [8, 60])
@pytest.mark.parametrize("packing", ["documents", "published"])
def test_packing_in_memory_equals_a_loop(packing, block, align):
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


@pytest.mark.parametrize("vocab_size, token_bytes", [(65536, 2), (65537, 4), (2**20, 4)])
def test_tokens_take_two_bytes_where_the_vocabulary_allows(
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
