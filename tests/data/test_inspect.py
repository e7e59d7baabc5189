"""`python -m calm_jax.data.inspect`: counts, lengths and examples of prepared text, and its checks."""

import json

import numpy as np
import pytest

from calm_jax.data.inspect import lengths, round_trips, with_boundaries
from calm_jax.data.shards import PAGES
from calm_jax.data.tokenizers import ByteTokenizer
from tests.data.preparing import prepared
from tests.workdirs import run

BYTES = ByteTokenizer(b"")
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id
# bos, the bytes and eos: 3, 10, 20 and 403 tokens.
TEXTS = ["a", "日本 x", "line\nand tabs\t and", "é" * 200 + "!"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspected")
    lines = [json.dumps({"text": text}) + "\n" for text in [*TEXTS, ""]]
    (folder / "texts.jsonl").write_text("".join(lines))
    return prepared(folder / "prepared", [folder / "texts.jsonl"], shard_characters=5)


@pytest.mark.parametrize(
    "first, chunk_size, shown",
    [
        (0, 4, "⟨bos⟩abc|d⟨eos⟩⟨pad⟩⟨pad⟩|⟨bos⟩x"),
        # Begins within a chunk.
        (3, 4, "⟨bos⟩|abcd|⟨eos⟩⟨pad⟩⟨pad⟩⟨bos⟩|x"),
        (8, 16, "⟨bos⟩abcd⟨eos⟩⟨pad⟩⟨pad⟩|⟨bos⟩x"),
        (0, 1, "⟨bos⟩|a|b|c|d|⟨eos⟩|⟨pad⟩|⟨pad⟩|⟨bos⟩|x"),
    ],
)
def test_bars_stand_where_chunks_of_the_whole_text_begin(first, chunk_size, shown):
    tokens = np.array([BOS, *b"abcd", EOS, PAD, PAD, BOS, *b"x"])
    assert with_boundaries(tokens, first, chunk_size, BYTES) == shown


def test_a_character_of_several_tokens_is_shown_after_its_last_token():
    tokens = np.array([BOS, *"日x".encode(), 0xFF, *b"y"])
    shown = with_boundaries(tokens, 0, 2, BYTES)
    assert shown.replace("|", "") == "⟨bos⟩日x\ufffdy"
    assert shown.count("|") == 3


def test_lengths_are_counted_by_powers_of_two(text):
    counts = lengths(text)
    assert {int(power): int(counts[power]) for power in np.nonzero(counts)[0]} == {
        1: 1,
        3: 1,
        4: 1,
        8: 1,
    }


def test_round_trips_of_whole_documents_give_the_same_tokens(text):
    assert round_trips(text, 100) == (4, 4)
    assert round_trips(text, 2) == (2, 2)


def test_a_document_cut_inside_a_character_fails_its_round_trip(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "日" * 20}) + "\n")
    cut = prepared(tmp_path / "p", [tmp_path / "a.jsonl"], packing="published", block_tokens=60)
    assert round_trips(cut, 9) == (0, 1)


@pytest.mark.slow
def test_the_command_prints_counts_and_finds_damage(text, tmp_path):
    out = run(
        "calm_jax.data.inspect", str(text.folder), "--examples=1", "--tokens=8", "--checksums"
    )
    assert "documents" in out and "436" in out and "left out: empty" in out
    assert "⟨bos⟩a⟨eos⟩" in out
    assert "4 of 4 documents give the same tokens" in out
    assert text.num_shards > 1 and f"the checksums are right: {text.num_shards} shards\n" in out

    pages = min(text.folder.glob("shard-*")) / PAGES
    whole = pages.read_bytes()
    # In the filler of the last page, which no read of tokens checks: only the whole file's checksum shows it.
    pages.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])
    try:
        line = run("calm_jax.data.inspect", str(text.folder), "--checksums", status=2)
    finally:
        pages.write_bytes(whole)
    assert "checksum" in line and "shard-00000" in line
    assert "is no prepared text" in run("calm_jax.data.inspect", str(tmp_path), status=2)
