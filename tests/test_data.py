"""Corpus (files to documents) and pipeline (documents to batches of blocks)."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from calm_jax.data import corpus as corpus_lib
from calm_jax.data.corpus import DataConfig, Document, is_held_out, load_corpus
from calm_jax.data.pipeline import (
    MASKED,
    BlockConfig,
    Blocks,
    encode_documents,
    evaluation_batches,
    pack,
    training_batches,
)
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError

BYTES = ByteTokenizer(b"")
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id


def data_config(train_files="", **changes) -> DataConfig:
    defaults = {
        "validation_files": "",
        "text_field": "text",
        "holdout_every": 2,
        "on_bad_record": "raise",
    }
    return DataConfig(train_files=str(train_files), **(defaults | changes))


def block_config(block_tokens=8, eos=False, align=False, front_fill="none") -> BlockConfig:
    return BlockConfig(block_tokens, eos, align, front_fill)


def packed(documents, config, chunk_size=4, seed=0, keep_remainder=True) -> Blocks:
    encoded = [np.asarray(ids, np.int32) for ids in documents]
    return pack(encoded, BYTES, config, chunk_size, seed, keep_remainder, "the text")


def read_all(config: DataConfig) -> list[Document]:
    """All documents of `train_files`, which serve as validation files too."""
    return load_corpus(
        DataConfig(**(vars(config) | {"validation_files": config.train_files}))
    ).train


# --- Corpus -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> list[Document]:
    return corpus_lib.standard_library_documents()


def test_standard_library_is_sorted_source_without_tests(library):
    paths = [pathlib.PurePosixPath(document.name) for document in library]
    assert paths == sorted(set(paths))
    assert {"json/decoder.py", "argparse.py"} <= {str(path) for path in paths}
    assert all(path.suffix == ".py" for path in paths)
    left_out = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
    assert not [path for path in paths if left_out & set(path.parts[:-1])]


def test_standard_library_is_split_by_the_hash_of_names(library):
    split = load_corpus(data_config(holdout_every=20))
    assert split.train + split.validation != library  # it is no cut at one place
    assert sorted(split.train + split.validation, key=lambda d: pathlib.PurePosixPath(d.name)) == (
        library
    )
    assert all(is_held_out(document.name, 20) for document in split.validation)
    assert not any(is_held_out(document.name, 20) for document in split.train)
    assert 0.02 < len(split.validation) / len(library) < 0.1


def test_hold_out_does_not_change_between_versions():
    """Pinned: another hash would move training text into the validation split of old workdirs."""
    held_out = [number for number in range(30) if is_held_out(f"{number}.txt", 5)]
    assert held_out == [6, 9, 10, 13, 14, 15, 17, 19]


def test_new_files_leave_the_split_of_old_ones_alone(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    before = load_corpus(data_config(tmp_path / "*.txt"))
    for number in range(20, 40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    after = load_corpus(data_config(tmp_path / "*.txt"))
    assert {d.name for d in before.train} < {d.name for d in after.train}
    assert {d.name for d in before.validation} < {d.name for d in after.validation}
    assert not {d.name for d in after.train} & {d.name for d in after.validation}
    assert load_corpus(data_config(tmp_path / "*.txt")) == after


def test_txt_is_a_document_a_file_and_json_a_document_a_line(tmp_path):
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    (tmp_path / "a.txt").write_text("é\ttab  ")
    records = [{"text": "first\r\n"}, {"text": ""}, {"id": 3, "text": "日本 😀"}]
    lines = "\n".join(json.dumps(record) for record in records)
    (tmp_path / "c.jsonl").write_text(lines + "\n\n")
    (tmp_path / "d.json").write_text(lines)
    config = data_config(f"{tmp_path}/*.txt, {tmp_path}/c.jsonl,{tmp_path}/d.json")
    assert read_all(config) == [
        Document("a.txt", "é\ttab  "),
        Document("b.txt", "one\ntwo\n"),
        Document("c.jsonl:1", "first\r\n"),
        Document("c.jsonl:3", "日本 😀"),
        Document("d.json:1", "first\r\n"),
        Document("d.json:3", "日本 😀"),
    ]


def test_txt_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert read_all(data_config(tmp_path / "a.txt"))[0].text == "a\r\nb\rc\n"


def test_text_field_is_chosen(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes"}\n')
    documents = read_all(data_config(tmp_path / "a.jsonl", text_field="content"))
    assert [document.text for document in documents] == ["yes"]


def test_validation_files_replace_the_hold_out(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text(name)
    config = data_config(tmp_path / "train.txt", validation_files=str(tmp_path / "validation.txt"))
    split = load_corpus(config)
    assert [d.text for d in split.train] == ["train"]
    assert [d.text for d in split.validation] == ["validation"]


BAD_LINES = {
    "malformed JSON": b'{"text": "x"',
    "invalid UTF-8": b'{"text": "\xff"}',
    "missing field": b'{"body": "x"}',
    "not text": b'{"text": ["x"]}',
    "lone surrogate": rb'{"text": "\ud800"}',
}
MORE_BAD_LINES = [
    (b"[1]", "no field 'text'"),
    (b'{"text": null}', "NoneType"),
    (b'{"text": ' + b"[" * 100_000, "not valid JSON"),
    pytest.param(
        b'{"text": "x", "n": ' + b"1" * 5000 + b"}",
        "not valid JSON",
    ),
]
DETAILS = {
    "malformed JSON": "not valid JSON",
    "invalid UTF-8": "byte 10 is not valid UTF-8",
    "missing field": "no field 'text'",
    "not text": "list, not a string",
    "lone surrogate": "lone surrogate",
}


@pytest.mark.parametrize(
    "line, detail", [(BAD_LINES[kind], DETAILS[kind]) for kind in BAD_LINES] + MORE_BAD_LINES
)
def test_bad_line_is_named_by_file_and_number(tmp_path, line, detail):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(UserError) as error:
        load_corpus(data_config(file))
    assert f"{file}, line 3: " in str(error.value)
    assert detail in str(error.value)
    assert "\n" not in str(error.value)


def test_txt_of_other_encoding_is_named(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("déjà".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt: byte 1 is not valid UTF-8"):
        load_corpus(data_config(file))


def test_skip_counts_bad_records_by_kind(tmp_path):
    lines = [*BAD_LINES.values(), BAD_LINES["not text"], b'{"text": "good"}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "v.txt").write_text("validation")
    split = load_corpus(
        data_config(
            f"{tmp_path}/a.jsonl,{tmp_path}/b.txt",
            validation_files=str(tmp_path / "v.txt"),
            on_bad_record="skip",
        )
    )
    assert split.train == [Document("a.jsonl:7", "good")]
    assert split.skipped == dict.fromkeys(BAD_LINES, 1) | {"not text": 2, "invalid UTF-8": 2}


@pytest.mark.parametrize("name", ["missing.txt", "*.jsonl"])
def test_missing_file_is_named(tmp_path, name):
    with pytest.raises(UserError, match=r"data\.train_files: no file matches"):
        load_corpus(data_config(tmp_path / name))


def test_missing_validation_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"data\.validation_files: no file matches 'gone'"):
        load_corpus(data_config(tmp_path / "a.txt", validation_files="gone"))


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_empty_corpus_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match="holds no text"):
        load_corpus(data_config(tmp_path / "a.jsonl"))


def test_corpus_of_bad_records_alone_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(UserError, match="holds no text"):
        load_corpus(data_config(tmp_path / "a.jsonl", on_bad_record="skip"))


def test_other_suffixes_and_folders_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(UserError, match=r"a\.csv is none of \.txt, \.jsonl, \.json"):
        load_corpus(data_config(tmp_path / "a.csv"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match=r"folder\.txt cannot be read"):
        load_corpus(data_config(tmp_path / "folder.txt"))


@pytest.mark.parametrize("held_out", [False, True])
def test_each_split_gets_a_document_where_the_hash_gives_it_none(tmp_path, held_out):
    numbers = [n for n in range(50) if is_held_out(f"{n}.txt", 2) == held_out][:3]
    for number in numbers:
        (tmp_path / f"{number}.txt").write_text("x")
    corpus = load_corpus(data_config(tmp_path / "*.txt"))
    alone, others = (
        (corpus.train, corpus.validation) if held_out else (corpus.validation, corpus.train)
    )
    assert (len(alone), len(others)) == (1, 2)
    assert load_corpus(data_config(tmp_path / "*.txt")) == corpus


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="holds one document"):
        load_corpus(data_config(tmp_path / "a.txt"))


@pytest.mark.parametrize(
    "changes",
    [{"on_bad_record": "ignore"}, {"holdout_every": 1}, {"validation_files": "v.txt"}],
)
def test_bad_data_config_is_refused(changes):
    with pytest.raises(UserError, match=f"data.{next(iter(changes))}"):
        data_config(**changes)


# --- Packing ------------------------------------------------------------------------------------


def test_encoding_keeps_the_order_of_many_documents():
    documents = [Document(str(number), f"text {number}") for number in range(600)]
    encoded = encode_documents(documents, BYTES)
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
    assert blocks.num_valid == len(expected)
    assert blocks.tokens.shape == (-(-len(expected) // 8), 8)
    assert blocks.tokens.dtype == np.int32
    assert blocks.tokens.reshape(-1)[: len(expected)].tolist() == expected

    dropped = packed(documents, block_config(eos=eos, align=align), keep_remainder=False)
    whole = len(expected) // 8
    assert dropped.num_valid == 8 * whole
    np.testing.assert_array_equal(dropped.tokens, blocks.tokens[:whole])


def test_filler_is_masked_and_pads_of_documents_are_not():
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
    # Document d is written in the letter d alone, so that a chunk shows whose it is.
    documents = [[number] * int(rng.integers(0, 12)) for number in range(40)]
    blocks = packed(documents, config, chunk_size, seed)
    targets = np.concatenate([blocks[index]["targets"] for index in range(len(blocks))])
    text = [token for token in targets.tolist() if token not in (PAD, MASKED)]
    assert text == [
        token for ids in documents for token in ([BOS, *ids, EOS] if eos else [BOS, *ids])
    ]
    # Filler follows all text.
    assert (targets[: blocks.num_valid] != MASKED).all()
    assert (targets[blocks.num_valid :] == MASKED).all()
    assert len(targets) - blocks.num_valid < config.block_tokens
    if align:
        owner = np.cumsum(targets == BOS)
        for chunk, owners in zip(
            targets.reshape(-1, chunk_size), owner.reshape(-1, chunk_size), strict=True
        ):
            assert len(set(owners[(chunk != PAD) & (chunk != MASKED)])) <= 1


# --- Batches ------------------------------------------------------------------------------------


def numbered(num_blocks: int) -> Blocks:
    """Blocks of two tokens whose first token is the block's index."""
    tokens = np.stack([np.arange(num_blocks), np.full(num_blocks, 7)], axis=1).astype(np.int32)
    return Blocks(tokens, tokens.size)


def take(iterator, number: int) -> list[np.ndarray]:
    """The blocks' indices in each of the next batches."""
    return [batch["tokens"][:, 0] for batch in itertools.islice(iterator, number)]


def test_batches_have_tokens_and_targets():
    blocks = packed([range(17)], block_config())
    batch = next(training_batches(blocks, 3, 0, 0, 1))
    assert sorted(batch) == ["targets", "tokens"]
    assert batch["tokens"].shape == batch["targets"].shape == (3, 8)
    assert (batch["targets"] == MASKED).sum() == 6
    valid = batch["targets"] != MASKED
    np.testing.assert_array_equal(batch["targets"][valid], batch["tokens"][valid])


@pytest.mark.parametrize(
    "batch_size",
    [
        1,
        2,
        4,
        10,
        16,
    ],
)
def test_each_epoch_covers_every_block_once_in_a_new_order(batch_size):
    """Also where an epoch ends inside a batch, and where a batch is larger than an epoch."""
    batches = take(training_batches(numbered(10), batch_size, 0, 0, 1), -(-40 // batch_size))
    epochs = np.concatenate(batches)[:40].reshape(4, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(10), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert tuple(range(10)) not in {tuple(epoch) for epoch in epochs.tolist()}


def test_order_follows_from_the_seed():
    first, same, other = (take(training_batches(numbered(10), 5, s, 0, 1), 4) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("process_index, process_count", [(0, 1), (1, 2)])
@pytest.mark.parametrize("done", [0, 1, 7])
def test_restored_iterator_goes_on_with_the_next_batch(done, process_index, process_count):
    """7 batches of 4 are into the third epoch of 10 blocks."""

    def fresh():
        return training_batches(numbered(10), 4, 3, process_index, process_count)

    iterator = fresh()
    take(iterator, done)
    state = iterator.get_state()
    expected = take(iterator, 6)
    restored = fresh()
    restored.set_state(state)
    np.testing.assert_array_equal(take(restored, 6), expected)
    # The state is a value: what the iterator did after get_state has not changed it.
    restored = fresh()
    take(restored, 5)
    restored.set_state(state)
    np.testing.assert_array_equal(take(restored, 6), expected)


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_side_by_side_give_the_batches_of_one(process_count):
    one = take(training_batches(numbered(10), 8, 1, 0, 1), 7)
    parts = [
        take(training_batches(numbered(10), 8, 1, index, process_count), 7)
        for index in range(process_count)
    ]
    assert {len(part) for part in itertools.chain(*parts)} == {8 // process_count}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), one)


@pytest.mark.parametrize("indices", [range(10), [0, 3, 6], [5], range(8)])
@pytest.mark.parametrize("process_count", [1, 2])
def test_evaluation_covers_each_index_once_with_masked_filler(indices, process_count):
    blocks = numbered(10)
    processes = [
        list(evaluation_batches(blocks, indices, 4, index, process_count))
        for index in range(process_count)
    ]
    assert {len(batches) for batches in processes} == {-(-len(indices) // 4)}
    seen = []
    for side_by_side in zip(*processes, strict=True):
        for batch, index in side_by_side:
            assert batch["tokens"].shape == batch["targets"].shape == (4 // process_count, 2)
            real = index >= 0
            np.testing.assert_array_equal(batch["tokens"][real], blocks.tokens[index[real]])
            np.testing.assert_array_equal(batch["targets"][real], blocks.tokens[index[real]])
            assert (index[~real] == -1).all()
            assert (batch["targets"][~real] == MASKED).all()
        seen += np.concatenate([index for _, index in side_by_side]).tolist()
    assert [index for index in seen if index >= 0] == list(indices)
    assert len(seen) == -(-len(indices) // 4) * 4
