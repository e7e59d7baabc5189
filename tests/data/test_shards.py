"""Prepared text: the tokens equal those of a naive loop over the documents, for any shards; missing shards are made again."""

import gzip
import itertools
import os
import random
import shutil

import numpy as np
import pytest

from calm_jax.data import packing as blocks_lib
from calm_jax.data.documents import Document, digest_of, pieces
from calm_jax.data.prepare import make_shards, scan, work_files
from calm_jax.data.prepare import options as inputs_lib
from calm_jax.data.shards import left_out, prepared_blocks
from calm_jax.data.tokenizers import TokenizerConfig, make_tokenizer
from calm_jax.errors import UserError
from tests.data.preparing import (
    BYTES,
    all_in_one,
    contents,
    each_alone,
    everything,
    flat,
    frames,
    json_lines,
    laid_out,
    middle_first,
    naive_documents,
    naive_published,
    naive_tokens,
    no_report,
    options,
    prepared,
    random_texts,
    write_mixed,
    write_parquet,
)

# --- Tokens equal those of a loop over the documents --------------------------------------------

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
def test_shards_concatenated_are_the_documents_concatenated(tmp_path, frame, shard_characters):
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
def test_random_pads_depend_on_document_and_seed_and_not_on_shards(
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
def test_division_of_shards_into_tasks_changes_no_byte(tmp_path, monkeypatch, runs, packing):
    monkeypatch.setattr(scan, "PUBLISHED_GROUP", 50)
    monkeypatch.setattr(blocks_lib, "PUBLISHED_GROUP", 50)
    texts = random_texts(3, 400, 20)
    files = write_mixed(tmp_path / "in", [*texts, *random_texts(4, 8)])
    changes = packing | {"shard_characters": 600, "deduplicate": True, "front_fill": "random"}
    alone = prepared(tmp_path / "alone", files, **changes)
    assert alone.num_shards > 2
    prepared(tmp_path / "runs", files, runs=runs, **changes)
    assert contents(tmp_path / "runs") == contents(tmp_path / "alone")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_reading_of_any_format_can_begin_at_any_shard(tmp_path, name):
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


def test_files_without_documents_change_no_token(tmp_path):
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


def test_sentencepiece_tokens_decode_to_the_texts(tmp_path):
    tokenizer = make_tokenizer(
        TokenizerConfig("sentencepiece", "", 380, True), random_texts(7, 200)
    )
    texts = random_texts(8, 50)
    files = write_mixed(tmp_path / "in", texts)
    text = prepared(tmp_path / "out", files, tokenizer, shard_characters=1000)
    assert everything(text) == flat(naive_tokens(texts, options(), tokenizer))
    assert text.tokenizer.fingerprint == tokenizer.fingerprint
    assert [text.tokenizer.decode(tokens) for tokens in text.documents(1)] == texts


# --- Published packing --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block, deduplicate", [(64, False), (8, True), (1000, True)])
def test_published_packing_equals_a_loop_over_groups(tmp_path, block, deduplicate):
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
def test_published_shards_begin_with_a_group_wherever_copies_are(tmp_path, seed, monkeypatch):
    """Also copies at the borders of groups and files, and so many that a group extends over several files."""
    monkeypatch.setattr(scan, "PUBLISHED_GROUP", 10)
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
def test_a_text_of_max_words_stays_whole_and_a_longer_one_is_cut(words, sizes):
    document = Document("name", " ".join(["word"] * words))
    assert [len(piece.text.split(" ")) for piece in pieces(document, 5)] == sizes
    assert {piece.name for piece in pieces(document, 5)} == {"name"}
    assert pieces(document, 0) == [document]


@pytest.mark.parametrize("partition, segment", [(10**6, 10**6), (50, 7), (9, 50), (10, 2)])
def test_the_first_of_equal_documents_stays(tmp_path, monkeypatch, partition, segment):
    monkeypatch.setattr(scan, "_PARTITION", partition)
    monkeypatch.setattr(scan, "_SEGMENT", segment)
    monkeypatch.setattr(inputs_lib, "_GROUP_FILES", 3)
    rng = random.Random(0)
    texts = random_texts(11, 40, 30)
    texts = rng.choices(texts, k=50) + texts + rng.choices(texts, k=60)
    files = write_mixed(tmp_path / "in", texts)
    text = prepared(tmp_path / "out", files, deduplicate=True, shard_characters=400)
    expected = list(dict.fromkeys(texts))
    assert [BYTES.decode(tokens) for tokens in text.documents(1)] == expected
    assert text.index["left_out"] == {"equal to one before": len(texts) - len(expected)}
    assert left_out(text.index) == {"duplicate of an earlier document": len(texts) - len(expected)}
    assert text.num_documents == len(expected)


def test_digests_at_the_borders_of_parts_belong_to_one_part(tmp_path):
    """Both for numbers of parts that divide 2**64 and for others."""
    for num_parts in (1, 2, 3, 4, 7):
        borders = {2**64 * part // num_parts + d for part in range(num_parts + 1) for d in (-1, 0)}
        rows = [(key, 5, n) for key in borders if 0 <= key < 2**64 for n in (3, 1, 2)]
        work = tmp_path / str(num_parts)
        work.mkdir()
        work_files.write_rows(work / "digests.json", np.array(sorted(rows), np.uint64))
        for part in range(num_parts):
            scan.find_copies(work, ["digests.json"], num_parts, part)
        found = [work_files.read_rows(scan.copies_path(work, part)) for part in range(num_parts)]
        assert sorted(np.concatenate(found)[:, 0].tolist()) == sorted([2, 3] * (len(rows) // 3))


def test_the_digest_depends_on_where_the_prompt_ends():
    documents = [
        Document("", "ab", "c"),
        Document("", "b", "ca"),
        Document("", "cab"),
        Document("", "abc"),
    ]
    assert len({digest_of(document) for document in documents}) == 4
    assert digest_of(Document("x", "ab", "c")) == digest_of(Document("y", "ab", "c"))


# --- Resuming -----------------------------------------------------------------------------------


def test_a_missing_shard_is_made_again_with_the_same_bytes(tmp_path):
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


def test_an_incomplete_shard_in_the_work_folder_is_ignored(tmp_path):
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


def test_an_interrupted_worker_leaves_no_incomplete_shard(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(22, 60))
    asked = options(shard_characters=10**9)
    layout = laid_out(tmp_path / "out", files, asked)

    def fail(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_shards.make_shards(tmp_path / "out", layout.work, asked, fail, (0, 1))
    assert make_shards.pending(tmp_path / "out", 1) == [0]
    assert not list(layout.work.glob("shard-*"))


def test_a_shard_made_by_another_worker_is_kept(tmp_path):
    files = write_mixed(tmp_path / "in", random_texts(23, 20))
    asked = options()
    layout = laid_out(tmp_path / "out", files, asked)
    make_shards.make_shards(tmp_path / "out", layout.work, asked, no_report, (0, 1))
    before = contents(tmp_path / "out")
    make_shards.make_shards(tmp_path / "out", layout.work, asked, no_report, (0, 1))
    assert contents(tmp_path / "out") == before


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["all", pytest.param("published", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_no_document_of_a_changed_text_gets_into_a_shard(name, packing, tmp_path, monkeypatch):
    """Checks end at marks and, to bound the memory, between them; shards may begin within what a check covers."""
    monkeypatch.setattr("calm_jax.data.prepare.scan._CHECKED", 500)
    monkeypatch.setattr("calm_jax.data.prepare.options._signature", lambda file: "the same")
    block_tokens = 8 if packing == "published" else 0
    asked = options(packing=packing, block_tokens=block_tokens, shard_characters=40_000)
    texts = random_texts(7, 4000, 60)

    def write(texts) -> None:
        if name == "a.parquet":
            write_parquet(tmp_path / name, texts)
        else:
            data = json_lines(texts)
            (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)

    write(texts)
    layout = laid_out(tmp_path, [tmp_path / name], asked)
    assert layout.num_shards > 1
    assert len(layout.files[0]["checks"]) > len(layout.files[0]["marks"])
    for number in range(0, len(texts), 397):
        write([*texts[:number], "not " + texts[number], *texts[number + 1 :]])
        good = []
        with pytest.raises(UserError, match="has changed since the preparation began"):
            for place, document in layout.documents(0, len(texts), asked):
                good.append((place, document.text))
        assert good == list(enumerate(texts[: len(good)])) and len(good) <= number
    write(texts[:-1])
    with pytest.raises(UserError, match="has changed since the preparation began"):
        list(layout.documents(layout.bounds[-2], len(texts), asked))
    write(texts)
    for first, stop in itertools.pairwise([0, 1, 700, *layout.bounds[1:]]):
        if first < stop:
            found = [(place, one.text) for place, one in layout.documents(first, stop, asked)]
            assert found == list(enumerate(texts))[first:stop]
