"""Documents from files: every format gives the same documents; damage is an error or counted, never ignored."""

import codecs
import collections
import gzip
import json

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from calm_jax.data import documents as documents_lib
from calm_jax.data import files as files_lib
from calm_jax.data.documents import Document, Reading, read_documents
from calm_jax.data.files import find_files
from calm_jax.errors import UserError
from tests.data.preparing import frames

TEXTS = ["plain", "line\nbreak\r\n and\ttab", "naïve 日本 😀", "nul \0 byte", " " * 5000 + "x"]
LINES = b"".join(json.dumps({"text": text, "id": 1}).encode() + b"\n" for text in TEXTS)


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


def read(pattern, on_bad_record="raise", text_field="text", **changes):
    """`(documents, counts of records left out)`."""
    skipped = collections.Counter()
    files = find_files(str(pattern), "data.train_files")
    reading = Reading(text_field, on_bad_record=on_bad_record, **changes)
    found = list(read_documents(files, "data.train_files", reading, skipped))
    return found, dict(skipped)


def test_every_format_gives_the_same_texts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.json").write_bytes(LINES.replace(b"\n", b"\r\n"))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(LINES) + gzip.compress(LINES))
    (tmp_path / "d.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    (tmp_path / "e.json.zst").write_bytes(frames(LINES, 7))
    parquet(tmp_path / "f.parquet", [{"id": 1, "text": text} for text in TEXTS])
    for file in sorted(tmp_path.iterdir()):
        found, skipped = read(file)
        assert [document.text for document in found] == TEXTS * (1 + (file.suffix == ".gz"))
        assert not skipped
    # Compression does not change names, which decide what is held out.
    (tmp_path / "d.jsonl").write_bytes(LINES)
    assert read(tmp_path / "d.jsonl") == read(tmp_path / "d.jsonl.zst")
    for text in TEXTS:
        (tmp_path / "g.txt.gz").write_bytes(gzip.compress(text.encode()))
        assert read(tmp_path / "g.txt.gz")[0] == [Document("g.txt", text)]


def test_remote_files_give_the_documents_of_local_ones(tmp_path):
    memory = fsspec.filesystem("memory")
    for name, data in (("a.jsonl", LINES), ("b.jsonl.zst", frames(LINES, 100))):
        memory.pipe(f"/bucket/{name}", data)
        (tmp_path / name).write_bytes(data)
    assert read("memory://bucket/*.jsonl*") == read(tmp_path / "*.jsonl*")
    with pytest.raises(UserError, match="no file matches 'memory://bucket/"):
        find_files("memory://bucket/*.txt", "data.train_files")


def damaged(tmp_path):
    whole = LINES * 40
    cases = {
        "cut.jsonl.zst": zstandard.ZstdCompressor().compress(whole)[:-7],
        "cut.jsonl.gz": gzip.compress(whole)[:-9],
        "noise.jsonl.zst": b"(\xb5/\xfd" + bytes(100),
        "noise.jsonl.gz": bytes(50),
        "noise.parquet": b"PAR1" + bytes(50),
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
    return cases


def test_a_damaged_file_is_named_or_counted(tmp_path):
    for name in damaged(tmp_path):
        with pytest.raises(UserError, match=name) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
        found, skipped = read(tmp_path / name, "skip")
        assert sum(skipped.values()) >= 1
        # Documents before the damage are kept.
        assert [document.text for document in found] == (TEXTS * 40)[: len(found)]


def test_a_randomly_damaged_file_is_a_user_error_or_gives_texts(tmp_path):
    """No other exception is raised for any of 400 files."""
    rng = np.random.default_rng(0)
    rows = [{"text": text} for text in TEXTS]
    parquet(tmp_path / "whole.parquet", rows)
    whole = {
        "a.jsonl": LINES,
        "a.jsonl.gz": gzip.compress(LINES, mtime=0),
        "a.jsonl.zst": frames(LINES, 200),
        "a.parquet": (tmp_path / "whole.parquet").read_bytes(),
    }
    for name, data in whole.items():
        path = tmp_path / name
        for _ in range(100):
            bad = bytearray(data)
            if rng.random() < 0.3:
                bad = bad[: rng.integers(len(bad))]
            else:
                for place in rng.integers(len(bad), size=rng.integers(1, 4)):
                    bad[place] = rng.integers(256)
            path.write_bytes(bad)
            try:
                found, _ = read(path)
            except UserError as error:
                assert name in str(error)
                continue
            assert all(isinstance(document.text, str) for document in found)


def test_zstd_with_a_long_window_is_read(tmp_path):
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=30)
    packed = zstandard.ZstdCompressor(compression_params=window).compress(LINES)
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert [document.text for document in read(tmp_path / "a.jsonl.zst")[0]] == TEXTS


def test_a_byte_order_mark_is_not_part_of_the_first_record(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINES)
    assert [document.text for document in read(tmp_path / "a.jsonl")[0]] == TEXTS


def test_an_existing_name_with_brackets_is_not_a_glob(tmp_path):
    (tmp_path / "a[1].jsonl").write_bytes(LINES)
    assert len(read(tmp_path / "a[1].jsonl")[0]) == len(TEXTS)
    with pytest.raises(UserError, match="no file matches"):
        read(tmp_path / "b[1].jsonl")


def test_a_folder_with_the_name_of_a_file_is_refused(tmp_path):
    (tmp_path / "a.jsonl").mkdir()
    with pytest.raises(UserError, match=r"a.jsonl is a folder: name the files in it"):
        find_files(str(tmp_path / "*.jsonl"), "data.train_files")


def test_empty_texts_and_short_ones_are_counted(tmp_path):
    rows = [{"text": ""}, {"text": "short"}, {"text": "long enough"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, skipped = read(tmp_path / "a.jsonl", min_characters=6)
    assert [document.text for document in found] == ["long enough"]
    assert skipped == {"empty": 1, "under 6 characters": 1}


def test_an_unreachable_network_is_one_line(monkeypatch):
    """For any type of exception that a file system's library raises."""

    class Unreachable(Exception):
        pass

    def fail(*_):
        raise Unreachable("no route\nto host")

    monkeypatch.setattr(fsspec.core, "url_to_fs", fail)
    expected = r"'hf://a/\*.jsonl' cannot be listed \(Unreachable: no route to host\)"
    with pytest.raises(UserError, match=expected):
        find_files("hf://a/*.jsonl", "data.train_files")


def test_a_name_of_files_executes_nothing(tmp_path):
    """A stranger's config.json may name a reference file, whose templates fsspec before 2026.6 executed."""
    pytest.importorskip("jinja2", reason="fsspec fills in templates with jinja2")
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(tmp_path / "made") + "') }}"
    generated = {"key": template, "url": "memory://a", "dimensions": {"i": {"stop": 1}}}
    reference = {"version": 1, "refs": {}, "gen": [generated]}
    (tmp_path / "a.json").write_text(json.dumps(reference))
    with pytest.raises(UserError, match=r"reference://"):
        find_files(f"reference://*.txt::file://{tmp_path}/a.json", "data.train_files")
    assert not (tmp_path / "made").exists()


def test_a_line_that_is_too_long_is_left_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files_lib, "MOST_BYTES", 1 << 20)
    long = json.dumps({"text": "x" * (3 << 20)}).encode()
    (tmp_path / "a.jsonl").write_bytes(LINES + long + b"\n" + LINES + long)
    found, skipped = read(tmp_path / "a.jsonl", "skip")
    assert [document.text for document in found] == TEXTS * 2
    assert skipped == {"long line": 2}
    with pytest.raises(UserError, match=f"a.jsonl, line {len(TEXTS) + 1}: .*longer than 1 MiB"):
        read(tmp_path / "a.jsonl")


def test_a_text_that_is_too_long_is_to_be_split(tmp_path, monkeypatch):
    monkeypatch.setattr(files_lib, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(documents_lib, "MOST_BYTES", 1 << 20)
    (tmp_path / "a.txt").write_bytes(b"x" * (1 << 20) + b"x")
    with pytest.raises(UserError, match=r"a\.txt: .*longer than 1 MiB: split it, as `split "):
        read(tmp_path / "a.txt")


def test_a_byte_order_mark_is_no_text_and_tells_utf16(tmp_path):
    for content in (codecs.BOM_UTF8 + b"a text", b"a text"):
        (tmp_path / "a.txt").write_bytes(content)
        assert [document.text for document in read(tmp_path / "a.txt")[0]] == ["a text"]
    (tmp_path / "a.txt").write_text("a text", encoding="utf-16")
    with pytest.raises(UserError, match=r"byte 0 is not valid UTF-8 .iconv -f utf-16 -t utf-8"):
        read(tmp_path / "a.txt")


def test_a_line_as_long_as_the_limit_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    longest = max(map(len, LINES.splitlines(keepends=True)))
    monkeypatch.setattr(files_lib, "MOST_BYTES", longest)
    assert len(read(tmp_path / "a.jsonl")[0]) == len(TEXTS)
    monkeypatch.setattr(files_lib, "MOST_BYTES", longest - 1)
    assert read(tmp_path / "a.jsonl", "skip")[1] == {"long line": 1}


def test_bad_rows_of_a_table_are_named_or_counted(tmp_path):
    parquet(tmp_path / "a.parquet", [{"text": "good"}, {"text": None}, {"text": "also"}])
    with pytest.raises(UserError, match=r"a.parquet, row 2: field 'text' is NoneType"):
        read(tmp_path / "a.parquet")
    found, skipped = read(tmp_path / "a.parquet", "skip")
    assert [document.text for document in found] == ["good", "also"]
    assert skipped == {"not text": 1}
    with pytest.raises(
        UserError,
        match=r"a.parquet, row 1: no field 'content': --config.data.text_field=NAME takes another",
    ):
        read(tmp_path / "a.parquet", text_field="content")


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    reading = read_documents(
        [str(path)], "data.train_files", Reading("text"), collections.Counter()
    )
    next(reading)
    path.write_bytes(LINES * 2)
    with pytest.raises(UserError, match=r"a.jsonl was changed while it was read"):
        list(reading)


def test_unknown_formats_are_refused(tmp_path):
    for name in ("a.csv", "a.parquet.gz", "a.zst"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(
            UserError, match=f"{name} has an unknown format; known are .txt, .jsonl"
        ):
            find_files(str(tmp_path / name), "data.train_files")


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(frames(LINES, 100))
    with pytest.raises(
        UserError,
        match=r"needs zstandard: pip install -c constraints.txt -e '\.\[data\]' in the clone",
    ):
        read(tmp_path / "a.jsonl.zst")
