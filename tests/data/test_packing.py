"""Documents to blocks in memory: special tokens, masks, and windows of equal context."""

import numpy as np
import pytest

from calm_jax.data.corpus import Document
from calm_jax.data.loader import evaluation_batches
from calm_jax.data.packing import (
    MASKED,
    BlockConfig,
    Blocks,
    document_windows,
    encode_documents,
    pack,
)
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError

BYTES = ByteTokenizer(b"")
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id


def block_config(
    block_tokens=8, eos=False, align=False, front_fill="none", packing="windows", isolate=False
) -> BlockConfig:
    return BlockConfig(block_tokens, packing, eos, align, front_fill, isolate)


def packed(documents, config, chunk_size=4, seed=0, keep_remainder=True) -> Blocks:
    encoded = [np.asarray(ids, np.int32) for ids in documents]
    return pack(encoded, BYTES, config, chunk_size, seed, keep_remainder, "the text")


# --- Packing ------------------------------------------------------------------------------------


def test_published_packing_of_too_little_text_is_refused():
    with pytest.raises(
        UserError, match="the text has no group of 1000 documents that fills a block"
    ):
        packed([[1, 2]] * 2000, block_config(block_tokens=4096, packing="published"))
    assert len(packed([[1, 2]] * 3, block_config(block_tokens=8, packing="published"))) == 1


def test_encoding_keeps_the_order_of_many_documents():
    documents = [Document(str(number), f"text {number}") for number in range(600)]
    encoded = encode_documents([document.text for document in documents], BYTES)
    assert [BYTES.decode(ids) for ids in encoded] == [document.text for document in documents]
    assert {ids.dtype for ids in encoded} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    "eos, align, expected",
    [
        (False, False, [BOS, 1, 2, 3, BOS, 4, BOS, 5, 6, 7, 8]),
        (True, False, [BOS, 1, 2, 3, EOS, BOS, 4, EOS, BOS, 5, 6, 7, 8, EOS]),
        (False, True, [BOS, 1, 2, 3, BOS, 4, PAD, PAD, BOS, 5, 6, 7, 8, PAD, PAD, PAD]),
        (
            True,
            True,
            [BOS, 1, 2, 3, EOS, PAD, PAD, PAD, BOS, 4, EOS, PAD, BOS, 5, 6, 7, 8, EOS, PAD, PAD],
        ),
    ],
)
def test_packing_by_hand(eos, align, expected):
    documents = [[1, 2, 3], [4], [5, 6, 7, 8]]
    blocks = packed(documents, block_config(eos=eos, align=align))
    assert blocks.num_valid.sum() == len(expected)
    assert (blocks.num_valid[:-1] == 8).all()
    assert blocks.tokens.shape == (-(-len(expected) // 8), 8)
    assert blocks.tokens.dtype == np.int32
    assert blocks.tokens.reshape(-1)[: len(expected)].tolist() == expected

    dropped = packed(documents, block_config(eos=eos, align=align), keep_remainder=False)
    whole = len(expected) // 8
    assert dropped.num_valid.tolist() == [8] * whole
    np.testing.assert_array_equal(dropped.tokens, blocks.tokens[:whole])


def test_filler_is_masked_and_pads_inside_documents_are_not():
    blocks = packed([[1], [2, 3]], block_config(align=True, block_tokens=12))
    assert len(blocks) == 1
    assert blocks[0]["tokens"].tolist() == [BOS, 1, PAD, PAD, BOS, 2, 3, PAD] + [PAD] * 4
    assert blocks[0]["targets"].tolist() == [BOS, 1, PAD, PAD, BOS, 2, 3, PAD] + [MASKED] * 4


def test_only_the_last_block_is_masked():
    blocks = packed([range(17)], block_config())
    targets = [blocks[index]["targets"] for index in range(len(blocks))]
    assert [(row == MASKED).sum() for row in targets] == [0, 0, 6]
    assert (blocks.tokens != MASKED).all()


def test_random_front_fill_is_0_to_k_minus_1_pads_before_bos():
    documents = [[number] for number in range(200)]
    config = block_config(front_fill="random", block_tokens=4)
    flat = packed(documents, config, chunk_size=4).tokens.reshape(-1)
    places = np.flatnonzero(flat == BOS)
    assert flat[places + 1].tolist() == [number for (number,) in documents]
    fronts = np.diff(np.concatenate([[-2], places])) - 2
    assert set(fronts) == {0, 1, 2, 3}
    others = np.ones(len(flat), bool)
    others[np.concatenate([places, places + 1])] = False
    assert (flat[others] == PAD).all()
    # Each count has expectation 50; 4.5 standard deviations are 28.
    assert (np.abs(np.bincount(fronts) - 50) < 28).all()

    same, other = (packed(documents, config, seed=seed).tokens for seed in (0, 1))
    np.testing.assert_array_equal(same.reshape(-1), flat)
    assert not np.array_equal(other.reshape(-1)[:100], flat[:100])


def test_front_fill_counts_for_alignment():
    blocks = packed([[1, 2]] * 50, block_config(4, eos=True, align=True, front_fill="random"))
    flat = blocks.tokens.reshape(-1).tolist()
    for chunk in blocks.tokens:
        ids = [token for token in chunk.tolist() if token != PAD]
        assert ids.count(BOS) <= 1 and ids.count(EOS) <= 1
        assert BOS not in ids[1:]
    assert flat.count(BOS) == flat.count(EOS) == 50


def test_too_little_text_names_both_numbers():
    documents = [[1, 2, 3], [4, 5]]
    with pytest.raises(UserError, match=r"the text has 7 tokens, and one block needs 8"):
        packed(documents, block_config(), keep_remainder=False)
    assert len(packed(documents, block_config(eos=True), keep_remainder=False)) == 1


def test_bad_front_fill_is_refused():
    with pytest.raises(UserError, match="front_fill='left'"):
        block_config(front_fill="left")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("align", [False, True])
def test_no_token_is_lost_and_aligned_chunks_hold_one_document(seed, align):
    rng = np.random.default_rng(seed)
    chunk_size = int(rng.integers(1, 6))
    eos = bool(rng.integers(2))
    config = block_config(
        block_tokens=chunk_size * int(rng.integers(1, 7)),
        eos=eos,
        align=align,
        front_fill=("none", "random")[rng.integers(2)],
    )
    # Document d consists of token d, so that each chunk shows which document it belongs to.
    documents = [[number] * int(rng.integers(0, 12)) for number in range(40)]
    blocks = packed(documents, config, chunk_size, seed)
    targets = np.concatenate([blocks[index]["targets"] for index in range(len(blocks))])
    text = [token for token in targets.tolist() if token not in (PAD, MASKED)]
    assert text == [
        token for ids in documents for token in ([BOS, *ids, EOS] if eos else [BOS, *ids])
    ]
    # Filler follows all text.
    num_valid = blocks.num_valid.sum()
    assert (targets[:num_valid] != MASKED).all()
    assert (targets[num_valid:] == MASKED).all()
    assert len(targets) - num_valid < config.block_tokens
    if align:
        owner = np.cumsum(targets == BOS)
        for chunk, owners in zip(
            targets.reshape(-1, chunk_size), owner.reshape(-1, chunk_size), strict=True
        ):
            assert len(set(owners[(chunk != PAD) & (chunk != MASKED)])) <= 1


# --- Windows of equal context -------------------------------------------------------------------


def test_targets_of_partly_filled_blocks_are_masked():
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)
    blocks = Blocks(tokens.copy(), np.array([5, 2, 0, 4]))
    for index, valid in enumerate([5, 2, 0, 4]):
        assert blocks[index]["tokens"].tolist() == tokens[index].tolist()
        targets = blocks[index]["targets"].tolist()
        assert targets == tokens[index, :valid].tolist() + [MASKED] * (5 - valid)
    # Only targets are masked, not tokens.
    np.testing.assert_array_equal(blocks.tokens, tokens)


def test_batches_of_partly_filled_blocks_keep_their_masks():
    blocks = Blocks(np.arange(24, dtype=np.int32).reshape(6, 4), np.array([4, 1, 3, 0, 2, 4]))
    (first, _), (second, index) = evaluation_batches(blocks, range(6), 4, range(4))
    targets = np.concatenate([first["targets"], second["targets"][index >= 0]])
    np.testing.assert_array_equal((targets != MASKED).sum(1), blocks.num_valid)


def windows_of(documents, block=8, context=3, unit=4, eos=False) -> Blocks:
    whole = [np.asarray([BOS, *ids, *[EOS] * eos], np.int32) for ids in documents]
    return document_windows(whole, PAD, block, context, unit)


def numbered_documents(lengths) -> list[np.ndarray]:
    """Documents in which no token occurs twice, neither within one nor across them."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


LENGTHS = [40, 1, 7, 8, 3, 2, 12, 13, 14, 0, 25]


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("block, context", [(8, 3), (8, 1), (8, 4), (16, 12), (12, 2), (7, 3)])
def test_each_token_after_the_context_is_scored_once_after_its_true_context(block, context, eos):
    documents = numbered_documents(LENGTHS)
    # Tokens here may have the ids of bos or eos: they are told apart by document and place.
    texts = [[BOS, *ids.tolist(), *[EOS] * eos] for ids in documents]
    blocks = windows_of(documents, block, context, eos=eos)
    rows = [
        row[:valid].tolist() for row, valid in zip(blocks.tokens, blocks.num_valid, strict=True)
    ]
    scored = []
    for text_index, text in enumerate(texts):
        place = 0
        while place + context < len(text):
            row = rows.pop(0)
            assert row == text[place : place + block]
            for offset in range(context, len(row)):
                # At least `context` tokens precede it, and they precede it in the document, too.
                assert row[:offset] == text[place : place + offset]
                scored.append((text_index, place + offset))
            place += block - context
    assert not rows
    assert scored == [
        (index, place) for index, text in enumerate(texts) for place in range(context, len(text))
    ]


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 12, 16])
def test_windows_of_different_chunk_sizes_differ_only_in_masked_filler(unit):
    documents = numbered_documents(LENGTHS)
    one, other = windows_of(documents, unit=1), windows_of(documents, unit=unit)
    assert other.tokens.shape == (len(one), 8 + -8 % unit)
    np.testing.assert_array_equal(one.num_valid, other.num_valid)
    for index, valid in enumerate(other.num_valid):
        assert other.tokens[index, :valid].tolist() == one.tokens[index, :valid].tolist()
        assert (other.tokens[index, valid:] == PAD).all()
        assert (other[index]["targets"][valid:] == MASKED).all()
        assert (other[index]["targets"][:valid] != MASKED).all()


def test_documents_without_a_token_after_the_context_have_no_window():
    # 3 tokens of context are bos and two tokens of text.
    assert len(windows_of([[1, 2], [1], []])) == 0
    assert windows_of([[1, 2], [5, 6, 7]]).tokens.tolist() == [[BOS, 5, 6, 7]]
    assert windows_of([[1, 2]], eos=True).tokens.tolist() == [[BOS, 1, 2, EOS]]


def test_windows_are_as_wide_as_the_longest_document_needs():
    assert windows_of([[1, 2, 3], [5, 6, 7, 8]], block=10**12).tokens.shape == (2, 8)
