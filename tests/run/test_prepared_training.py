"""Prepared text trains like the text it was made of, and several sources are mixed by their weights."""

import itertools
import json
import shutil

import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.data.loader import TrainingText, training_batches
from calm_jax.data.packing import MASKED, Blocks
from calm_jax.data.shards import PAGES
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.run.dataset import Dataset, read_corpus
from tests import tiny_recipe
from tests.data.test_shards import prepared
from tests.workdirs import assert_same_bits, train

BYTES = ByteTokenizer(b"")
FRAMED = {"append_eos": True, "align_documents_to_chunks": True}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two files with 40 documents in all to train on, and one to score on."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for name, number in (("a", 25), ("b", 15), ("held_out", 12)):
        words = [" ".join(rng.choice(["the", "fox", "dog", "\n"], size=60)) for _ in range(number)]
        lines = [json.dumps({"text": f"{name} {text}"}) + "\n" for text in words]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folders(texts, tmp_path_factory):
    """The two training files as prepared text: each alone, and both in one folder."""
    root = tmp_path_factory.mktemp("prepared")
    for name in ("a", "b"):
        files = [texts / f"{name}.jsonl"]
        prepared(root / name, files, shard_characters=1000, **FRAMED)
    prepared(root / "both", [texts / "a.jsonl", texts / "b.jsonl"], shard_characters=1000, **FRAMED)
    return root


def text_of(texts, train_files, **changes) -> Dataset:
    config = tiny_recipe.get_config("")
    config.data.train_files = str(train_files)
    config.data.validation_files = str(texts / "held_out.jsonl")
    config.autoencoder.data.front_fill = config.lm.data.front_fill = "none"
    config.autoencoder.data.append_eos = config.autoencoder.data.align_documents_to_chunks = True
    config.update_from_flattened_dict(changes)
    resolved = resolve(config)
    return Dataset(resolved, read_corpus(resolved, resolved.stages), BYTES)


def first_batches(text: TrainingText, number=12, seed=0, **changes) -> list[np.ndarray]:
    options = {"first_batch": 0, "mine": range(4), "read_threads": 0}
    batches = training_batches(text.rows(seed), 4, **(options | changes))
    return [np.stack([b["tokens"], b["targets"]]) for b in itertools.islice(batches, number)]


@pytest.mark.parametrize("packing", ["windows", "documents"])
@pytest.mark.parametrize("stage", ["autoencoder", "lm"])
def test_prepared_text_gives_the_same_batches_as_its_files(texts, folders, stage, packing):
    """With packing="documents" it gives the same tokens in other blocks, because no block reaches over two shards."""
    changes = {f"{stage}.data.packing": packing}
    raw = text_of(texts, f"{texts}/a.jsonl,{texts}/b.jsonl", **changes).training(stage)
    shards = text_of(texts, folders / "both", **changes).training(stage)
    if packing == "windows":
        np.testing.assert_array_equal(first_batches(raw), first_batches(shards))
        np.testing.assert_array_equal(first_batches(raw), first_batches(shards, read_threads=3))
        np.testing.assert_array_equal(raw.targets(7), shards.targets(7))
        return
    tokens = [np.sort(text.targets(10**6), axis=None) for text in (raw, shards)]
    np.testing.assert_array_equal(*(token[token != MASKED] for token in tokens))


@pytest.mark.parametrize(
    "files, line",
    [
        (
            {"only": 2000},
            "only.txt is the only document: the last 100 of its 2,000 characters are held",
        ),
        ({"a": 2000, "b": 3000, "c": 10}, "held out for validation: 1 of 3 documents, with "),
    ],
)
def test_a_run_says_what_of_little_text_it_holds_out(files, line, tmp_path, capsys):
    for name, number in files.items():
        (tmp_path / f"{name}.txt").write_text("x" * number)
    tree = tiny_recipe.get_config(f"{tmp_path}/*.txt")
    tree.data.holdout_every = 20
    read_corpus(resolve(tree), ("lm",))
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("order", ["short first", "long first"])
def test_the_floor_of_large_text_counts_n_grams_of_all_its_parts(order, tmp_path, monkeypatch):
    """Of few documents, of which one is far longer: no more n-grams than the limit, and mostly those of the long one."""
    monkeypatch.setattr("calm_jax.run.dataset._FLOOR_NGRAMS", 1000)
    texts = ["a" * 40, "b" * 20_000]
    for name, text in zip("12", texts if order == "short first" else texts[::-1], strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    files = f"{tmp_path}/*.txt"
    tree = tiny_recipe.get_config(files)
    tree.data.validation_files = files
    config = resolve(tree)
    dataset = Dataset(config, read_corpus(config, ("lm",)), ByteTokenizer(b""))
    found_N4 = dataset.training_ngrams()
    assert 900 <= len(found_N4) <= 1010
    assert (found_N4 == ord("b")).all(1).mean() > 0.95 and (found_N4 == ord("a")).any()


@pytest.mark.parametrize("floor", ["floor", "equal_context_floor"])
def test_prepared_text_has_the_same_frequency_floor_as_its_files(texts, folders, floor):
    raw, shards = (
        getattr(text_of(texts, files), floor)()
        for files in (f"{texts}/[ab].jsonl", folders / "both")
    )
    np.testing.assert_equal(tuple(shards), tuple(raw))
    assert raw.ngrams > 100


def test_records_without_an_answer_are_counted(texts, tmp_path, capsys):
    rows = [{"prompt": "p", "text": "answer" * (number > 1)} for number in range(5)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"data.prompt_field": "prompt", "data.validation_files": f"{tmp_path}/records.jsonl"}
    text_of(texts, tmp_path / "records.jsonl", **asked).training("lm")
    assert "data: 2 of 5 training records with an empty completion" in capsys.readouterr().out


def test_the_floor_of_documents_that_are_shorter_than_its_n_grams_is_0(texts, tmp_path):
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n' * 100)
    dataset = text_of(texts, tmp_path / "short.jsonl")
    assert dataset.training_ngrams().shape == (0, 4)
    assert dataset.equal_context_floor().brier == (0,) * 4


@pytest.mark.parametrize("stage", ["all", "autoencoder", "lm"])
def test_scoring_reads_the_text_for_floors_alone_whatever_stage_is_trained(texts, stage):
    recipe = tiny_recipe.get_config(f"{texts}/a.jsonl")
    recipe.stage = stage
    recipe.data.validation_files = str(texts / "held_out.jsonl")
    recipe.data.autoencoder_files = str(texts / "is_gone.jsonl")
    config = resolve(recipe)
    assert Dataset(config, read_corpus(config, ("lm",)), BYTES).floor().ngrams > 100
    # An autoencoder alone is scored without any training text.
    assert not Dataset(config, read_corpus(config, ()), BYTES).has_train


def numbered(first: int, number: int) -> Blocks:
    tokens = np.repeat(np.arange(first, first + number, dtype=np.int32)[:, None], 2, axis=1)
    return Blocks(tokens, np.full(number, 2))


def test_a_mixture_keeps_its_weights_and_reads_a_source_whole_before_repeating_a_block():
    text = TrainingText([numbered(0, 90), numbered(1000, 7)], (0.8, 0.2))
    blocks = np.concatenate([batch[0, :, 0] for batch in first_batches(text, 100)])
    is_second = blocks >= 1000
    assert abs(is_second.mean() - 0.2) < 0.01
    for first, size, mine in ((0, 90, blocks[~is_second]), (1000, 7, blocks[is_second])):
        whole = mine[: len(mine) // size * size].reshape(-1, size)
        assert len(whole) > 1
        np.testing.assert_array_equal(
            np.sort(whole), np.tile(np.arange(first, first + size), (len(whole), 1))
        )
        assert len({tuple(epoch) for epoch in whole.tolist()}) == len(whole)


def test_without_weights_every_block_of_all_sources_is_read_once_an_epoch():
    text = TrainingText([numbered(0, 100), numbered(1000, 37), numbered(2000, 7)], ())
    blocks = np.concatenate([batch[0, :, 0] for batch in first_batches(text, 72)]).reshape(2, 144)
    expected = [*range(100), *range(1000, 1037), *range(2000, 2007)]
    np.testing.assert_array_equal(np.sort(blocks), [expected, expected])
    assert not np.array_equal(*blocks)


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("done", [1, 5])
def test_a_mixture_resumes_with_the_same_batches_on_any_number_of_processes(done, now):
    text = TrainingText([numbered(0, 11), numbered(100, 5), numbered(200, 2)], (3, 2, 1))
    whole = first_batches(text, done + 6)
    parts = [
        first_batches(
            text, 6, first_batch=done, mine=range(4)[index * 4 // now : (index + 1) * 4 // now]
        )
        for index in range(now)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole[done:])


def test_the_targets_of_a_mixture_follow_its_weights():
    text = TrainingText([numbered(0, 500), numbered(1000, 500)], (0.9, 0.1))
    targets = text.targets(200)[:, 0]
    assert len(targets) <= 260
    assert 0.05 < (targets >= 1000).mean() < 0.15
    # The first source has 9 blocks only, which limits how many are taken of the second.
    few = TrainingText([numbered(0, 9), numbered(1000, 500)], (0.9, 0.1)).targets(10**6)[:, 0]
    assert sorted(few[few < 1000]) == list(range(9)) and (few >= 1000).sum() == 1


def test_sources_are_mixed_by_the_weights_of_the_config(texts, folders):
    files = f"{folders / 'a'},{texts / 'b.jsonl'}"
    text = text_of(texts, files, **{"data.mixture": (1.0, 3.0)}).training("lm")
    first, second = ({bytes(block["tokens"]) for block in source} for source in text.sources)
    assert len(first) > len(second) and not first & second
    rows = [bytes(row) for batch in first_batches(text, 30) for row in batch[0]]
    assert sum(row in second for row in rows) == 90
    assert sum(row in first for row in rows) == 30


def test_the_autoencoder_is_trained_on_autoencoder_files(texts, folders):
    text = text_of(texts, folders / "a", **{"data.autoencoder_files": str(folders / "b")})
    (lm,), (autoencoder,) = text.training("lm").sources, text.training("autoencoder").sources
    assert (lm.text.folder.name, autoencoder.text.folder.name) == ("a", "b")


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"lm.data.append_eos": False},
            r"--append_eos=True, and lm\.data\.append_eos asks for False",
        ),
        ({"lm.data.front_fill": "random"}, r"--front_fill=none, and lm\.data\.front_fill asks for"),
        (
            {"lm.data.packing": "published"},
            r"--packing=all, .* --config\.lm\.data\.packing=windows",
        ),
        ({"chunk_size": 8}, r"--chunk_size=4, and chunk_size asks for 8: .*--chunk_size=8"),
        ({"lm.data.block_tokens": 2**20}, r"one block needs 1048576: give more text"),
        ({"data.prompt_field": "prompt"}, r"is prepared text, which has no data\.prompt_field"),
        (
            {"data.validation_files": ""},
            r"data\.validation_files is empty: nothing is held out of prepared text",
        ),
        (
            {"data.mixture": (0.5, 0.5)},
            r"data\.mixture=\(0\.5, 0\.5\) must have a weight for each of the 1",
        ),
        ({"data.mixture": (0.0,)}, r"data\.mixture=\(0\.0,\) must hold positive numbers"),
        (
            {"data.autoencoder_files": "gone"},
            r"there is no prepared text 'gone': .*autoencoder_files=",
        ),
        (
            {"data.train_files": "gone"},
            r"there is no prepared text 'gone': launch/prepare_pile\.sh",
        ),
        ({"data.max_words": -1}, r"data\.max_words=-1 must not be negative"),
    ],
)
def test_text_prepared_with_other_options_than_the_config_is_refused(
    texts, folders, changes, message
):
    with pytest.raises(UserError, match=message) as error:
        text_of(texts, folders / "both", **changes).training("lm")
    assert "\n" not in str(error.value)


def test_text_prepared_with_another_tokenizer_is_refused(texts, tmp_path):
    class Other(ByteTokenizer):
        def __init__(self):
            super().__init__(b"other")

    prepared(tmp_path / "other", [texts / "a.jsonl"], tokenizer=Other(), **FRAMED)
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        text_of(texts, tmp_path / "other")


def test_files_and_prepared_text_are_filtered_alike(texts, folders, tmp_path):
    """Minimum length, pieces of long documents, and copies."""
    lines = (texts / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "c.jsonl").write_text("".join([*lines, '{"text": "short"}\n', *lines[:5]]))
    chosen = {"min_characters": 10, "max_words": 7, "deduplicate": True}
    shards = prepared(tmp_path / "c", [tmp_path / "c.jsonl"], **chosen, **FRAMED)
    keys = {f"data.{key}": value for key, value in chosen.items()}
    raw = text_of(texts, tmp_path / "c.jsonl", **keys)
    np.testing.assert_array_equal(
        first_batches(raw.training("lm")),
        first_batches(text_of(texts, shards.folder).training("lm")),
    )
    assert (
        shards.num_documents
        < text_of(texts, tmp_path / "c.jsonl", **keys | {"data.deduplicate": False})
        ._sources[0]
        .documents.__len__()
    )


@pytest.mark.slow
def test_training_on_prepared_text_is_bitwise_training_on_its_files(texts, folders, tmp_path):
    """Same bits with and without preparation, also after a resume; a damaged shard ends the run."""
    shutil.copytree(folders / "both", tmp_path / "both")

    def fit(name, files, *more, **options):
        return train(
            str(files),
            tmp_path / name,
            "--config.lm.data.front_fill=none",
            "--config.autoencoder.data.front_fill=none",
            "--config.autoencoder.data.append_eos=True",
            "--config.autoencoder.data.align_documents_to_chunks=True",
            # Steps must not depend on num_steps, which differs between the two calls.
            "--config.lm.optimizer.schedule=constant",
            f"--config.data.validation_files={texts / 'held_out.jsonl'}",
            *more,
            **options,
        )

    fit("raw", f"{texts}/[ab].jsonl")
    fit("part", tmp_path / "both", "--config.lm.training.num_steps=7")
    fit("part", tmp_path / "both")
    assert_same_bits(tmp_path / "raw", tmp_path / "part")

    pages = min((tmp_path / "both").glob("shard-*")) / PAGES
    data = bytearray(pages.read_bytes())
    data[200] ^= 1
    pages.write_bytes(data)
    line = fit("damaged", tmp_path / "both", status=2)
    assert "the checksum of page 0 is wrong" in line and "give the command that prepared" in line
