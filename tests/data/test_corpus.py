"""Files to the training and validation documents of a run."""

import json
import pathlib

import pytest

from calm_jax.data import corpus as corpus_lib
from calm_jax.data.corpus import DataConfig, Document, is_held_out, load_corpus
from calm_jax.errors import UserError
from configs import common


def data_config(train_files="", **changes) -> DataConfig:
    defaults = common.get_config().data.to_dict() | {"holdout_every": 2}
    return DataConfig(**(defaults | {"train_files": str(train_files)} | changes))


def read_all(config: DataConfig) -> list[Document]:
    """All documents of `train_files`; naming the same files for validation lets nothing be held out."""
    return load_corpus(
        DataConfig(**(vars(config) | {"validation_files": config.train_files}))
    ).train


@pytest.fixture(scope="module")
def library() -> list[Document]:
    return corpus_lib.standard_library_documents()


def test_standard_library_is_source_files_without_tests_sorted_by_path(library):
    paths = [pathlib.PurePosixPath(document.name) for document in library]
    assert paths == sorted(set(paths))
    assert {"json/decoder.py", "argparse.py"} <= {str(path) for path in paths}
    assert all(path.suffix == ".py" for path in paths)
    left_out = {"test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data"}
    assert not [path for path in paths if left_out & set(path.parts[:-1])]


def test_standard_library_is_split_by_the_hash_of_names(library):
    split = load_corpus(data_config(holdout_every=20))
    assert split.train + split.validation != library  # not a cut at one place
    assert sorted(split.train + split.validation, key=lambda d: pathlib.PurePosixPath(d.name)) == (
        library
    )
    assert all(is_held_out(document.name, 20) for document in split.validation)
    assert not any(is_held_out(document.name, 20) for document in split.train)
    assert 0.02 < len(split.validation) / len(library) < 0.1


@pytest.mark.slow
def test_filters_hold_for_the_standard_library_too(library):
    changes = {"min_characters": 2000, "max_words": 500, "deduplicate": True}
    corpora = [load_corpus(data_config(files, **changes)) for files in ("", "stdlib:")]
    texts = [document.text for document in corpora[0].train + corpora[0].validation]
    assert corpora[0] == corpora[1]
    short = [document for document in library if len(document.text) < 2000]
    assert corpora[0].skipped["under 2000 characters"] == len(short) > 0
    assert len(set(texts)) == len(texts) > len(library)
    assert max(text.count(" ") for text in texts) < 500


def test_a_comma_at_the_end_names_nothing(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n" * 9)
    config = data_config(f"{tmp_path}/a.txt,")
    assert [one.name for one in read_all(config)] == ["a.txt"]
    with pytest.raises(UserError, match=r"data\.train_files=', ' names no file"):
        load_corpus(data_config(", "))


def test_hold_out_does_not_change_between_versions():
    """Another hash would move training text into the validation split of existing workdirs."""
    held_out = [number for number in range(30) if is_held_out(f"{number}.txt", 5)]
    assert held_out == [6, 9, 10, 13, 14, 15, 17, 19]


def test_new_files_do_not_change_the_split_of_old_ones(tmp_path):
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


def test_a_txt_is_one_document_and_a_json_one_document_per_line(tmp_path):
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


def test_a_txt_keeps_its_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert read_all(data_config(tmp_path / "a.txt"))[0].text == "a\r\nb\rc\n"


def test_text_field_selects_the_field(tmp_path):
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
    (b"[", "a .json, too, holds one record on each line, as `jq -c '.[]'` writes"),
    (b"{", "a .json, too, holds one record on each line, as `jq -c .` writes"),
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
def test_brackets_in_strings_or_side_by_side_are_not_nesting(tmp_path, more):
    (tmp_path / "a.jsonl").write_text("{" + more + "}\n")
    (tmp_path / "v.txt").write_text("validation")
    split = load_corpus(data_config(tmp_path / "a.jsonl", validation_files=str(tmp_path / "v.txt")))
    assert [document.name for document in split.train] == ["a.jsonl:1"]


def test_a_txt_in_another_encoding_is_named(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes("déjà".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.txt: byte 1 is not valid UTF-8"):
        load_corpus(data_config(file))


def test_skip_counts_bad_records_by_reason(tmp_path):
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


def test_corpus_of_only_bad_records_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("{")
    with pytest.raises(UserError, match="holds no text"):
        load_corpus(data_config(tmp_path / "a.jsonl", on_bad_record="skip"))


def test_other_suffixes_and_folders_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(
        UserError, match=r"a\.csv has an unknown format; known are \.txt, \.jsonl, \.json"
    ):
        load_corpus(data_config(tmp_path / "a.csv"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(UserError, match=r"folder\.txt has no index\.json: it is no prepared text"):
        load_corpus(data_config(tmp_path / "folder.txt"))


@pytest.mark.parametrize("held_out", [False, True])
def test_each_split_gets_a_document_even_if_the_hash_gives_it_none(tmp_path, held_out):
    numbers = [n for n in range(50) if is_held_out(f"{n}.txt", 2) == held_out][:3]
    for number in numbers:
        (tmp_path / f"{number}.txt").write_text("x")
    corpus = load_corpus(data_config(tmp_path / "*.txt"))
    alone, others = (
        (corpus.train, corpus.validation) if held_out else (corpus.validation, corpus.train)
    )
    assert (len(alone), len(others)) == (1, 2)
    assert load_corpus(data_config(tmp_path / "*.txt")) == corpus


def test_files_of_one_name_are_split_by_their_paths(tmp_path, monkeypatch):
    """Not all together, as their name alone would have it. A name that only one file has stays as it is."""
    for number in range(40):
        (tmp_path / f"book{number}" / "text").mkdir(parents=True)
        (tmp_path / f"book{number}" / "text" / "chapter.txt").write_text("x")
    (tmp_path / "alone.txt").write_text("x")
    corpus = load_corpus(data_config(f"{tmp_path}/*/text/*.txt,{tmp_path}/alone.txt"))
    names = {one.name for one in corpus.train + corpus.validation}
    monkeypatch.chdir(tmp_path)
    assert load_corpus(data_config("*/text/*.txt,alone.txt")) == corpus
    assert names == {f"book{number}/text/chapter.txt" for number in range(40)} | {"alone.txt"}
    assert 10 <= len(corpus.validation) <= 31  # of 41, about a half


def test_the_pieces_of_a_text_stay_together(tmp_path):
    """Also where the hash alone would give one of the splits nothing; of an only text a piece is held out."""
    same = [n for n in range(50) if not is_held_out(f"{n}.txt", 2)][:2]
    for number in same:
        (tmp_path / f"{number}.txt").write_text("one two three four")
    corpus = load_corpus(data_config(tmp_path / "*.txt", max_words=2))
    assert [len({one.name for one in part}) for part in (corpus.train, corpus.validation)] == [1, 1]
    assert len(corpus.train) == len(corpus.validation) == 2
    for held_out in (False, True):
        name = next(f"{n}.txt" for n in range(50) if is_held_out(f"{n}.txt", 2) == held_out)
        (tmp_path / name).write_text("one two three four five six")
        alone = load_corpus(data_config(tmp_path / name, max_words=2))
        assert (len(alone.train), len(alone.validation)) == (2, 1)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"train_files": "{}/*.jsonl,{}/none.txt", "mixture": (0.5, 0.5)}, "no file matches"),
        ({"train_files": "{}/*.jsonl", "validation_files": "{}/none.txt"}, "no file matches"),
        (
            {"train_files": "{}/*.jsonl", "validation_files": "{}/*.txt", "prompt_field": "prompt"},
            "has no field 'prompt'",
        ),
        ({"train_files": "{}/*.jsonl,{}/text", "validation_files": "{}/*.txt"}, "unknown format"),
    ],
)
def test_what_is_missing_is_reported_before_text_is_read(changes, problem, tmp_path, monkeypatch):
    for name in ("a.jsonl", "a.txt", "text"):
        (tmp_path / name).write_text("x")

    def read(*args):
        raise AssertionError("text was read")

    monkeypatch.setattr(corpus_lib, "read_documents", read)
    files = {
        key: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(UserError, match=problem):
        load_corpus(data_config(**files))


def test_a_mixture_without_files_needs_a_weight_for_the_one_text_there_is():
    with pytest.raises(
        UserError, match=r"data\.mixture=\(0\.7, 0\.3\) must have a weight for each of the 1"
    ):
        data_config(mixture=(0.7, 0.3))
    data_config(mixture=(0.7, 0.3), validation_files="a.txt")


LINES = "".join(f"line {number}\r\n" for number in range(1000))
ONE_LINE = "一二三四五六七八九十" * 100


@pytest.mark.parametrize("text", [LINES, ONE_LINE], ids=["lines", "one line"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_of_an_only_document_the_end_is_held_out(tmp_path, suffix, text):
    file = tmp_path / f"input{suffix}"
    content = text if suffix == ".txt" else json.dumps({"text": text}) + "\n"
    file.write_bytes(content.encode())
    corpus = load_corpus(data_config(file, holdout_every=20))
    (train,), (validation,) = corpus.train, corpus.validation
    assert train.text + validation.text == text
    assert len(text) / 20 <= len(validation.text) < 1.5 * len(text) / 20 + 1
    assert text is ONE_LINE or (train.text[-1] == "\n" and validation.text.startswith("line "))
    assert corpus.cut == ((train.name, len(text), len(validation.text)),)
    assert load_corpus(data_config(file, holdout_every=20)) == corpus


def test_of_each_source_of_a_mixture_an_only_document_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text(LINES)
    for name in ("b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    files = f"{tmp_path}/a.txt,{tmp_path}/*.jsonl"
    corpus = load_corpus(data_config(files, mixture=(0.5, 0.5), holdout_every=20))
    assert [cut.name for cut in corpus.cut] == ["a.txt"]
    assert [len(source) for source in corpus.sources] == [1, 1]
    assert len(corpus.validation) == 2


def test_a_split_that_holds_out_much_of_little_text_is_told(tmp_path):
    large, small = sorted(["corpus.txt", "extra.txt"], key=corpus_lib._hash)
    (tmp_path / large).write_text("x" * 5000)
    (tmp_path / small).write_text("y" * 10)
    corpus = load_corpus(data_config(tmp_path / "*.txt", holdout_every=20))
    # Neither is held out by its hash, so the one of the smaller hash is.
    assert not any(is_held_out(name, 20) for name in (large, small))
    assert corpus.uneven == ((2, 5010, 1, 5000),)
    (tmp_path / large).write_text("x")
    assert load_corpus(data_config(tmp_path / "*.txt", holdout_every=4)).uneven == ()


def test_a_document_too_short_to_hold_out_its_end_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 19)
    with pytest.raises(UserError, match="holds one document of 19 characters"):
        load_corpus(data_config(tmp_path / "a.txt", holdout_every=20))


def test_an_only_record_with_a_prompt_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "p" * 100, "text": "t" * 100}) + "\n")
    with pytest.raises(UserError, match="holds one record"):
        load_corpus(data_config(tmp_path / "a.jsonl", prompt_field="prompt"))


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
