"""Corpus (files to documents) and pipeline (documents to batches of blocks)."""

import itertools
import json
import pathlib

import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.data import corpus as corpus_lib
from calm_jax.data.blocks import (
    MASKED,
    BlockConfig,
    Blocks,
    document_windows,
    encode_documents,
    pack,
)
from calm_jax.data.corpus import DataConfig, Document, is_held_out, load_corpus
from calm_jax.data.pipeline import TrainingText, evaluation_batches, training_batches
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.packed import Text, read_corpus
from configs import common
from tests import tiny_recipe

BYTES = ByteTokenizer(b"")
BOS, EOS, PAD = BYTES.bos_id, BYTES.eos_id, BYTES.pad_id


def data_config(train_files="", **changes) -> DataConfig:
    defaults = common.get_config().data.to_dict() | {"holdout_every": 2}
    return DataConfig(**(defaults | {"train_files": str(train_files)} | changes))


def block_config(
    block_tokens=8, eos=False, align=False, front_fill="none", packing="windows", isolate=False
) -> BlockConfig:
    return BlockConfig(block_tokens, packing, eos, align, front_fill, isolate)


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
    (b"[1]", "not an object with fields but a list"),
    (b'{"text": null}', "NoneType"),
    (b'{"text": ' + b"[" * 100_000, "more than 300 levels"),
    (b'{"text": "[[", "n": ' + b"[" * 300 + b"]" * 300 + b"}", "more than 300 levels"),
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


@pytest.mark.parametrize(
    "more",
    [
        json.dumps({"text": '[{"\\' * 1000})[1:-1],
        '"text": "x", "n": [' + "[]," * 1000 + "0]",
        '"text": "x", "n": ' + "[" * 299 + "]" * 299,
    ],
    ids=["in a string", "side by side", "299 levels"],
)
def test_brackets_alone_are_not_depth(tmp_path, more):
    (tmp_path / "a.jsonl").write_text("{" + more + "}\n")
    (tmp_path / "v.txt").write_text("validation")
    split = load_corpus(data_config(tmp_path / "a.jsonl", validation_files=str(tmp_path / "v.txt")))
    assert [document.name for document in split.train] == ["a.jsonl:1"]


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
    with pytest.raises(UserError, match=r"folder\.txt has no index\.json: it is no prepared text"):
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
    [
        {"on_bad_record": "ignore"},
        {"holdout_every": 1},
        {"prompt_field": "prompt"},
        {"prompt_field": "text", "train_files": "a.jsonl"},
    ],
)
def test_bad_data_config_is_refused(changes):
    with pytest.raises(UserError, match=f"data.{next(iter(changes))}"):
        data_config(**changes)


# --- Packing ------------------------------------------------------------------------------------


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


def test_blocks_are_ragged():
    tokens = np.arange(20, dtype=np.int32).reshape(4, 5)
    blocks = Blocks(tokens.copy(), np.array([5, 2, 0, 4]), np.zeros(4, int))
    for index, valid in enumerate([5, 2, 0, 4]):
        assert blocks[index]["tokens"].tolist() == tokens[index].tolist()
        targets = blocks[index]["targets"].tolist()
        assert targets == tokens[index, :valid].tolist() + [MASKED] * (5 - valid)
    # The masks are the targets' alone.
    np.testing.assert_array_equal(blocks.tokens, tokens)


def test_batches_of_ragged_blocks_keep_their_masks():
    blocks = Blocks(
        np.arange(24, dtype=np.int32).reshape(6, 4), np.array([4, 1, 3, 0, 2, 4]), np.zeros(6, int)
    )
    (first, _), (second, index) = evaluation_batches(blocks, range(6), 4, range(4))
    targets = np.concatenate([first["targets"], second["targets"][index >= 0]])
    np.testing.assert_array_equal((targets != MASKED).sum(1), blocks.num_valid)


def windows_of(documents, block=8, context=3, unit=4, eos=False) -> Blocks:
    whole = [np.asarray([BOS, *ids, *[EOS] * eos], np.int32) for ids in documents]
    return document_windows(whole, PAD, block, context, unit)


def numbered_documents(lengths) -> list[np.ndarray]:
    """Documents in which no token occurs twice, in none of the others either."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


LENGTHS = [40, 1, 7, 8, 3, 2, 12, 13, 14, 0, 25]


@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("block, context", [(8, 3), (8, 1), (8, 4), (16, 12), (12, 2), (7, 3)])
def test_each_token_after_the_context_is_scored_once_behind_its_true_text(block, context, eos):
    documents = numbered_documents(LENGTHS)
    # Ids of bos and eos may be those of tokens here: what counts is a token's document and place.
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
                # At least so much context, all of it from just before the token in its document.
                assert row[:offset] == text[place : place + offset]
                scored.append((text_index, place + offset))
            place += block - context
    assert not rows
    assert scored == [
        (index, place) for index, text in enumerate(texts) for place in range(context, len(text))
    ]


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 12, 16])
def test_windows_depend_on_the_chunk_size_in_their_masked_filler_alone(unit):
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
    # bos counts: 3 tokens of context are bos and two of the text.
    assert len(windows_of([[1, 2], [1], []])) == 0
    assert windows_of([[1, 2], [5, 6, 7]]).tokens.tolist() == [[BOS, 5, 6, 7]]
    assert windows_of([[1, 2]], eos=True).tokens.tolist() == [[BOS, 1, 2, EOS]]


def test_windows_are_no_wider_than_the_longest_of_them():
    assert windows_of([[1, 2, 3], [5, 6, 7, 8]], block=10**12).tokens.shape == (2, 8)


# --- The text of a recipe -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_files(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("windows")
    rng = np.random.default_rng(0)
    for number in range(9):
        words = rng.choice(["def", "self", "return", "(", ")", "x"], size=60 + 37 * number)
        (folder / f"{number}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


def recipe_text(files, arguments, **changes) -> Text:
    """The tiny recipe's text; documents side by side as the published code packs them."""
    tree = tiny_recipe.get_config(f"{files},{arguments}")
    tree.lm.data.align_documents_to_chunks = False
    tree.lm.data.front_fill = "none"
    tree.update_from_flattened_dict(changes)
    config = resolve(tree)
    return Text(config, read_corpus(config), BYTES)


def scored_ngrams(text: Text) -> tuple[list, list]:
    """The n-grams of the equal-context protocol, sorted, and how many count for each n."""
    ngrams_BP4, counted_BP4 = text._scored(text.windows(), text._config.eval.equal_context)
    return sorted(ngrams_BP4[counted_BP4[..., -1]].tolist()), counted_BP4.sum((0, 1)).tolist()


def ngrams_by_hand(text: Text, context: int, every: int) -> tuple[list, list]:
    """From the documents alone: at every multiple of `every` tokens from `context` on."""
    ngrams, counts = [], [0] * 4
    for ids in text._validation.encoded:
        document = [BOS, *ids.tolist(), EOS]
        for place in range(context, len(document), every):
            ngram = document[place : place + 4]
            ngrams += [ngram] if len(ngram) == 4 else []
            counts = [count + (len(ngram) >= n) for n, count in enumerate(counts, 1)]
    return sorted(ngrams), counts


@pytest.mark.parametrize(
    "variant", ["k=1", "k=2", "k=4", "k=8", "k=16", "head=softmax", "head=flow,k=8"]
)
def test_equal_context_scores_the_same_ngrams_for_every_model(text_files, variant):
    text = recipe_text(text_files, variant)
    expected = ngrams_by_hand(text, 16, 4)
    assert expected[0] and scored_ngrams(text) == expected


@pytest.mark.parametrize("variant", ["k=1", "k=2", "k=3", "k=4", "k=6", "head=softmax"])
def test_a_start_every_12_tokens_is_one_for_chunks_of_three_too(text_files, variant):
    changes = {"eval.start_every": 12, "eval.context_tokens": 12, "eval.block_tokens": 48}
    text = recipe_text(text_files, variant, **changes)
    expected = ngrams_by_hand(text, 12, 12)
    assert expected[0] and scored_ngrams(text) == expected


@pytest.mark.parametrize("variant", ["k=1", "k=2", "k=8", "k=16", "head=softmax"])
def test_equal_context_floor_is_one_for_every_model(text_files, variant):
    ours, expected = (recipe_text(text_files, v).equal_context_floor() for v in (variant, "k=4"))
    assert 0 < expected.brierlm < 100 and ours == expected


def test_equal_context_floor_is_one_for_every_chunk_size_when_chunks_are_aligned(text_files):
    changes = {"lm.data.align_documents_to_chunks": True, "lm.data.front_fill": "random"}
    floors = [
        recipe_text(text_files, variant, **changes).equal_context_floor().brierlm
        for variant in ("k=1", "k=2", "k=4", "k=8", "head=softmax")
    ]
    assert len(set(floors)) == 1


@pytest.mark.parametrize("variant", ["k=4", "k=16", "head=softmax"])
def test_context_longer_than_every_document_is_refused(text_files, variant):
    changes = {"eval.context_tokens": 5000, "eval.block_tokens": 6000}
    text = recipe_text(text_files, variant, **changes)
    longest = max(len(ids) for ids in text._validation.encoded) + 2
    with pytest.raises(
        UserError, match=rf"eval\.context_tokens=5000: .* {longest} tokens"
    ) as caught:
        text.windows()
    assert "\n" not in str(caught.value)


def test_starts_that_no_window_has_are_refused(text_files):
    with pytest.raises(UserError, match=r"nothing to score .* eval\.start_every=1000"):
        recipe_text(text_files, "k=4", **{"eval.start_every": 1000}).windows()


# --- Batches ------------------------------------------------------------------------------------


def numbered(num_blocks: int) -> Blocks:
    """Blocks of two tokens whose first token is the block's index."""
    tokens = np.stack([np.arange(num_blocks), np.full(num_blocks, 7)], axis=1).astype(np.int32)
    return Blocks(tokens, np.full(len(tokens), tokens.shape[1]), np.zeros(len(tokens), int))


def take(iterator, number: int) -> list[np.ndarray]:
    """The blocks' indices in each of the next batches."""
    return [batch["tokens"][:, 0] for batch in itertools.islice(iterator, number)]


def batches_of(blocks, batch_size, first=0, seed=0, process_index=0, process_count=1):
    rows = TrainingText([blocks], ()).rows(seed)
    return training_batches(
        rows, batch_size, first, part(batch_size, process_index, process_count), 0
    )


def part(batch_size, process_index, process_count):
    """The rows that one of several equal processes feeds."""
    rows = batch_size // process_count
    return range(process_index * rows, (process_index + 1) * rows)


def test_batches_have_tokens_and_targets():
    batch = next(batches_of(packed([range(17)], block_config()), 3))
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
    batches = take(batches_of(numbered(10), batch_size), -(-40 // batch_size))
    epochs = np.concatenate(batches)[:40].reshape(4, 10)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(10), (4, 1)))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert tuple(range(10)) not in {tuple(epoch) for epoch in epochs.tolist()}


def test_order_follows_from_the_seed():
    first, same, other = (take(batches_of(numbered(10), 5, seed=s), 4) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("then", [1, 2, 4])
@pytest.mark.parametrize("done", [0, 1, 7])
def test_a_resumed_run_gets_the_batches_that_are_left_on_any_number_of_processes(done, then, now):
    """7 batches of 4 are into the third epoch of 10 blocks."""

    def all_processes(count, first, number):
        parts = [
            take(batches_of(numbered(10), 4, first, 3, index, count), number)
            for index in range(count)
        ]
        return np.concatenate(parts, axis=1)

    whole = all_processes(1, 0, done + 6)
    np.testing.assert_array_equal(all_processes(then, 0, done + 2)[:done], whole[:done])
    np.testing.assert_array_equal(all_processes(now, done, 6), whole[done:])


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_side_by_side_give_the_batches_of_one(process_count):
    one = take(batches_of(numbered(10), 8, seed=1), 7)
    parts = [
        take(batches_of(numbered(10), 8, 0, 1, index, process_count), 7)
        for index in range(process_count)
    ]
    assert {len(part) for part in itertools.chain(*parts)} == {8 // process_count}
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), one)


@pytest.mark.parametrize("indices", [range(10), [0, 3, 6], [5], range(8)])
@pytest.mark.parametrize("process_count", [1, 2])
def test_evaluation_covers_each_index_once_with_masked_filler(indices, process_count):
    blocks = numbered(10)
    processes = [
        list(evaluation_batches(blocks, indices, 4, part(4, index, process_count)))
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
