"""Damage of prepared text or of compressed input is an error, or changes nothing."""

import collections
import functools
import json
import os
import pathlib
import random
import shutil
import zlib

import numpy as np
import pytest

from calm_jax.data import tokenizers
from calm_jax.data.documents import Reading, read_documents
from calm_jax.data.prepare import make_shards, work_files
from calm_jax.data.prepare.options import Input
from calm_jax.data.prepare.scan import Layout
from calm_jax.data.shards import PAGE, PreparedText, page_type
from calm_jax.data.tokenizers import SentencePieceTokenizer, TokenizerConfig, make_tokenizer
from calm_jax.errors import UserError
from tests.data.preparing import (
    BYTES,
    Characters,
    everything,
    frames,
    json_lines,
    laid_out,
    options,
    prepared,
    random_texts,
    write_mixed,
)


def read_all(folder) -> list[int]:
    """Reads everything of a prepared text, checksums included; returns its tokens."""
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
        # Half the time near the beginning, where the headers are.
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
    tokenizer = make_tokenizer(
        TokenizerConfig("sentencepiece", "", 380, True), random_texts(7, 200)
    )
    files = write_mixed(folder / "in", random_texts(17, 45))
    text = prepared(folder / "out", files, tokenizer, shard_characters=1700)
    assert text.num_shards == 3
    return folder / "out", everything(text)


def outcomes(folder, name: str, times: int, read, tokens: list[int]) -> collections.Counter:
    """Damages a file many times and reads it; counts the outcomes: "right", "refused", or the name of a fault."""
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


def test_a_damaged_shard_json_is_an_error_or_changes_nothing_when_the_index_is_written(
    small, tmp_path
):
    """Readers of a prepared text do not read shard.json."""
    folder = tmp_path / "out"
    shutil.copytree(small[0], folder)
    layout = Layout(folder / "work", Input((), ()), [], list(range(4)))
    layout.work.mkdir()
    work_files.write_rows(layout.work / "copies.json", np.zeros((0, 1), int))
    tokenizer = PreparedText(folder).tokenizer

    def read():
        make_shards.write_index(folder, layout, options(), tokenizer)
        return read_all(folder)

    name = "shard-00001-of-00003/shard.json"
    found = outcomes(folder, name, 300, read, small[1])
    assert found.keys() <= {"right", "refused"}
    assert found["refused"] > 250


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("checked.json", b"3", b"4"),
        ("copies.json", b"1", b"2"),
        ("copies.rows", b"\2\0", b"\1\0"),
    ],
)
def test_a_damaged_file_of_a_begun_preparation_is_refused(tmp_path, name, old, new):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", "b", "a"]))
    layout = laid_out(tmp_path, [tmp_path / "a.jsonl"], options(deduplicate=True))
    path, bounds = layout.work / name, layout.bounds

    def read() -> set[int]:
        return Layout.load(layout.work).copies(bounds[0], bounds[-1])

    whole = path.read_bytes()
    assert read() == {2}
    assert old in whole
    for content in (b"", b"{}", whole[:-4], whole.replace(old, new)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} cannot be read \(.*\): delete \S+/work and"):
            read()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        read()


def test_a_shard_with_a_file_missing_or_a_folder_in_its_place_is_named(tmp_path):
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


def test_a_flipped_bit_in_pages_is_always_an_error(small):
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


@pytest.mark.parametrize(
    "path, value",
    [
        (("shards", 0, "name"), 7),
        (("shards", 0, "name"), "../shard-00000-of-00003"),
        (("shards", 0, "name"), "\ud98d"),
        (("tokenizer", "vocab_size"), None),
        (("tokenizer", "fingerprint"), []),
        (("options", "chunk_size"), 0),
        (("options", "chunk_size"), [4]),
        (("shards", 0, "sha256"), ["pages.npy", "documents.npy"]),
        (("left_out",), True),
        (("left_out",), {"too short": "3"}),
    ],
)
def test_an_index_with_a_value_that_no_preparation_writes_is_refused(small, tmp_path, path, value):
    shutil.copytree(small[0], tmp_path / "out")
    file = tmp_path / "out" / "index.json"
    index = json.loads(file.read_text())
    *parents, last = path
    functools.reduce(lambda place, key: place[key], parents, index)[last] = value
    file.write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"^\S+/index.json (is damaged|cannot be read)"):
        PreparedText(tmp_path / "out")


def test_a_tokenizer_other_than_that_of_the_tokens_is_refused(small, tmp_path):
    shutil.copytree(small[0], tmp_path / "out")
    other = make_tokenizer(TokenizerConfig("sentencepiece", "", 380, True), random_texts(18, 200))
    assert isinstance(other, SentencePieceTokenizer)
    other.save(tmp_path / "out" / "tokenizer")
    with pytest.raises(UserError, match="tokenizer"):
        _ = PreparedText(tmp_path / "out").tokenizer


def cut_by_damage(data: bytes, suffix: str, rng: random.Random) -> bytes:
    """Compressed data followed by invalid bytes."""
    if suffix == ".zst":
        return frames(data, 9000) + rng.randbytes(100)
    packer = zlib.compressobj(wbits=31)
    # A block of a type that deflate does not have.
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH) + b"\7" * 100


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_gives_the_documents_before_the_damage(tmp_path, suffix):
    """The same documents from any place at which reading begins."""
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
def test_at_most_8_kib_before_the_damage_are_lost(tmp_path, suffix):
    """Python's gzip reads 8 KiB at a time, and returns none of them if they end in damage; zstd loses nothing."""
    texts, path = random_texts(24, 300), tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(cut_by_damage(json_lines(texts), suffix, random.Random(0)))
    reading, left_out = Reading("text", on_bad_record="skip"), collections.Counter()
    found = [item.text for item in read_documents([str(path)], "", reading, left_out)]
    assert found == texts[: len(found)]
    assert len(json_lines(texts[len(found) :])) <= (8192 if suffix == ".gz" else 0)
