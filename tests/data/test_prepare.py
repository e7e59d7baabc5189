"""python -m calm_jax.data.prepare: the same bytes on any workers and after any interruption; an error is one line."""

import collections
import contextlib
import errno
import fcntl
import gzip
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import distributed
import psutil
import pytest
import zstandard

from calm_jax.cli.ownership import owned
from calm_jax.data import files as files_lib
from calm_jax.data.documents import Reading, read_documents
from calm_jax.data.prepare import make_shards
from calm_jax.data.prepare.cluster import Reporter, Stopped
from calm_jax.data.shards import PreparedText
from calm_jax.data.tokenizers import ByteTokenizer, TokenizerConfig, make_tokenizer
from calm_jax.errors import UserError
from tests.data.preparing import (
    contents,
    frames,
    json_lines,
    laid_out,
    no_report,
    options,
    prepared,
    random_texts,
    write_mixed,
    write_parquet,
)
from tests.workdirs import ROOT, run, start

BYTES = ByteTokenizer(b"")
PREPARE = "calm_jax.data.prepare"

# Runs command lines, each given as a line of JSON, one after the other in one process and on one cluster.
_DRIVER = """
import json, sys
import distributed
from absl import flags
from calm_jax.cli.flags import parse_flags
from calm_jax.data.prepare import __main__ as prepare
from tests.captured import captured

cluster = distributed.LocalCluster(
    n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0", protocol="tcp"
)
with cluster:
    for line in sys.stdin:
        args = json.loads(line)
        flags.FLAGS.unparse_flags()
        if not any(arg.startswith(("--workers", "--scheduler")) for arg in args):
            args = [*args, f"--scheduler={cluster.scheduler_address}"]
        done = captured(lambda: prepare.main(parse_flags(["prepare", *args])))
        print(json.dumps(done), flush=True)
"""
Result = tuple[int, str, str]


@pytest.fixture(scope="module")
def prepare() -> Iterator[Callable[[list[str]], Result]]:
    """Calls the command with these arguments: `(exit status, stdout, stderr)`."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(args: list[str]) -> Result:
        driver.stdin.write(json.dumps(args) + "\n")
        driver.stdin.flush()
        return tuple(json.loads(driver.stdout.readline()))

    yield call
    driver.stdin.close()
    assert driver.wait(timeout=60) == 0


def accepted(result: Result) -> str:
    """Asserts that a command succeeded; returns its stdout."""
    status, out, err = result
    assert (status, err) == (0, ""), err
    return out


def refused(result: Result, *words: str) -> None:
    """Asserts that a command ended with status 2 and a one-line error that contains these words."""
    status, _, err = result
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def arguments(files, output, *more) -> list[str]:
    return [
        f"--input={','.join(map(str, files))}",
        "--tokenizer=bytes",
        f"--output={output}",
        *map(str, more),
    ]


def finished(output) -> dict[str, bytes]:
    """The files of a prepared folder, without those that depend on the names of the input files."""
    names = {"inputs.json", "lock"}
    return {name: data for name, data in contents(output).items() if name not in names}


def touched(folder) -> dict[str, int]:
    """The time of the last change of every file and folder."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def sentencepiece_model() -> bytes:
    return make_tokenizer(
        TokenizerConfig("sentencepiece", "", 380, True), random_texts(7, 200)
    ).model


def workers_of(command: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(command.pid).children(recursive=True)
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


@pytest.fixture
def files(tmp_path) -> list[pathlib.Path]:
    texts = random_texts(1, 60)
    return write_mixed(tmp_path / "in", texts + texts[::-4])


# --- The same bytes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_workers_write_the_bytes_of_a_run_without_a_cluster(tmp_path, files):
    output, temporary = tmp_path / "deep" / "out", tmp_path / "temporary"
    temporary.mkdir()
    asked = arguments(files, output, "--workers=2", "--shard_characters=900")
    printed = run(PREPARE, *asked, env=os.environ | {"TMPDIR": str(temporary)})
    assert not list(temporary.iterdir())
    expected = prepared(tmp_path / "loop", files, shard_characters=900)
    assert expected.num_shards > 5
    assert finished(output) == contents(tmp_path / "loop")
    count = f"{expected.num_documents:,} documents, {expected.num_tokens:,} tokens"
    assert f"{count} in {expected.num_shards} shards" in printed
    assert not (output / "work").exists()


@pytest.mark.slow
def test_no_warning_when_the_default_port_of_dask_is_taken(tmp_path, files):
    """Dask warns when the port of its HTTP server, 8787, is in use."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            taken.bind(("", 8787))
            taken.listen()
        command = start(PREPARE, *arguments(files[:1], tmp_path / "out", "--workers=1"))
        _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, "")


@pytest.mark.slow
def test_any_number_of_workers_writes_the_same_bytes(tmp_path):
    texts = random_texts(2, 3000, 60)
    files = write_mixed(tmp_path / "in", [*texts, *texts[::7], *random_texts(3, 40)])
    changes = {
        "deduplicate": True,
        "packing": "published",
        "block_tokens": 64,
        "front_fill": "random",
        "seed": 3,
        "max_words": 5,
        "shard_characters": 5000,
    }
    asked = [f"--{key}={value}" for key, value in changes.items()]
    expected = prepared(tmp_path / "loop", files, **changes)
    assert expected.num_shards > 3
    for workers in (1, 2, 3):
        output = tmp_path / str(workers)
        run(PREPARE, *arguments(files, output, f"--workers={workers}", *asked))
        assert finished(output) == contents(tmp_path / "loop")


@pytest.mark.slow
def test_a_running_cluster_writes_the_same_bytes(tmp_path, files, monkeypatch):
    """Also with paths relative to the command's folder, which is not the workers'."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    prepared(tmp_path / "loop", files, shard_characters=900, deduplicate=True)
    asked = ["--shard_characters=900", "--deduplicate"]
    relative = [os.path.relpath(file, ROOT) for file in files]
    with monkeypatch.context() as here:
        here.chdir(elsewhere)
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=2, dashboard_address=":0", host="127.0.0.1"
        )
    with cluster:
        address = f"--scheduler={cluster.scheduler_address}"
        run(PREPARE, *arguments(files, tmp_path / "out", address, *asked))
        assert finished(tmp_path / "out") == contents(tmp_path / "loop")
        out = os.path.relpath(tmp_path / "relative", ROOT)
        run(PREPARE, *arguments(relative, out, address, *asked))
        assert finished(tmp_path / "relative") == contents(tmp_path / "loop")
        # The cluster still runs.
        with distributed.Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.slow
def test_a_running_cluster_uses_the_new_tokenizer_of_a_folder_made_again(tmp_path, files, prepare):
    """Its workers, which cache the tokenizer, outlive the first preparation."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(sentencepiece_model())
    accepted(prepare(arguments(files, tmp_path / "out")))
    shutil.rmtree(tmp_path / "out")
    accepted(prepare([*arguments(files, tmp_path / "out"), f"--tokenizer={model}"]))
    tokenizer = make_tokenizer(TokenizerConfig("sentencepiece", str(model), 0, True), ())
    prepared(tmp_path / "loop", files, tokenizer)
    assert finished(tmp_path / "out") == contents(tmp_path / "loop")


# --- Bad input ----------------------------------------------------------------------------------


def test_wrong_flags_end_with_one_line_and_touch_nothing(tmp_path, files, prepare):
    file, out = files[0], tmp_path / "out"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious.txt").write_text("precious")
    (tmp_path / "text.txt").write_text("a text")
    (tmp_path / "a.csv").write_text("a text")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder.jsonl").mkdir()
    good = arguments([file], out)

    def changed(flag: str, value) -> list[str]:
        return [arg for arg in good if not arg.startswith(f"--{flag}=")] + [f"--{flag}={value}"]

    cases = [
        (good[1:], ["--input"]),
        ([good[0], good[2]], ["--tokenizer"]),
        (good[:2], ["--output"]),
        (changed("input", tmp_path / "no*.jsonl"), ["--input: no file matches", "no*.jsonl"]),
        (changed("input", " , "), ["--input=' , ' names no file"]),
        (changed("input", tmp_path / "a.csv"), ["a.csv has an unknown format"]),
        (changed("input", tmp_path / "dangling.jsonl"), ["dangling.jsonl"]),
        (changed("input", tmp_path / "folder.jsonl"), ["folder.jsonl"]),
        (changed("tokenizer", tmp_path / "no.model"), ["--tokenizer=", "no.model", "is no file"]),
        (changed("tokenizer", tmp_path / "text.txt"), ["tokenizer"]),
        (changed("tokenizer", tmp_path), ["--tokenizer=", "is no file"]),
        (changed("output", tmp_path / "text.txt"), ["--output=", "text.txt"]),
        (changed("output", tmp_path / "text.txt" / "a"), ["--output=", "text.txt/a"]),
        (
            changed("output", "gs://bucket/text"),
            ["--output=gs:", "must be a path of a file system"],
        ),
        (changed("output", tmp_path / "taken"), ["taken is not empty and holds no prepared text"]),
        ([*good, "--packing=published"], ["--block_tokens=0: --packing=published needs"]),
        ([*good, "--packing=published", "--block_tokens=-1"], ["--block_tokens=-1"]),
        ([*good, "--packing=windows"], ["--packing='windows'"]),
        ([*good, "--block_tokens=8"], ["--block_tokens=8 is for --packing=published"]),
        ([*good, "--front_fill=all"], ["--front_fill='all'"]),
        ([*good, "--on_bad_record=warn"], ["on_bad_record='warn'"]),
        ([*good, "--chunk_size=0"], ["--chunk_size=0"]),
        ([*good, "--chunk_size=99999999999999999999"], ["--chunk_size=99999999999999999999"]),
        ([*good, "--shard_characters=0"], ["--shard_characters=0"]),
        ([*good, "--seed=-1"], ["--seed=-1"]),
        ([*good, "--seed=4294967296"], ["--seed=4294967296"]),
        ([*good, "--min_characters=-1"], ["min_characters=-1"]),
        ([*good, "--max_words=-1"], ["max_words=-1"]),
        ([*good, "--workers=-1"], ["--workers=-1"]),
        ([*good, "--workers=2", "--scheduler=tcp://127.0.0.1:1"], ["--workers=2"]),
        ([*good, "--scheduler=nonsense"], ["--scheduler='nonsense'"]),
        ([*good, "--workers=many"], ["workers"]),
        ([*good, "--tokeniser=bytes"], ["tokeniser"]),
        ([*good, "more"], ["unexpected argument 'more'"]),
        ([*good, "--text_field=body"], [f"{file}, line 1: no field 'body'"]),
    ]
    before = contents(tmp_path)
    for command, words in cases:
        print(command)
        refused(prepare(command), *words)
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert not list(tmp_path.rglob("shard-*")) and not list(tmp_path.rglob("index.json"))
    # The failed commands leave nothing that the right one would refuse.
    accepted(prepare(good))


GOOD = b'{"text": "good"}\n'
BAD_RECORDS = {
    "broken.jsonl": (GOOD + b'{"text": "x"\n' + GOOD, "malformed JSON", "broken.jsonl, line 2"),
    "missing.jsonl": (GOOD + b'{"body": "x"}\n' + GOOD, "missing field", "line 2: no field 'text'"),
    "list.jsonl": (GOOD + b"[1]\n" + GOOD, "no object", "list.jsonl, line 2: not an object"),
    "number.jsonl": (GOOD + b'{"text": 5}\n' + GOOD, "not text", "line 2: field 'text' is int"),
    "null.jsonl": (GOOD + b'{"text": null}\n' + GOOD, "not text", "NoneType"),
    "lone.jsonl": (GOOD + rb'{"text": "\ud800"}' + b"\n" + GOOD, "lone surrogate", "line 2"),
    "latin.jsonl": (GOOD + b'{"text": "\xe9"}\n' + GOOD, "invalid UTF-8", "line 2: byte 10"),
    "deep.jsonl": (GOOD + b"[" * 100_000 + b"\n" + GOOD, "malformed JSON", "line 2"),
    "cut.jsonl.zst": (
        zstandard.ZstdCompressor().compress(GOOD * 2)
        + zstandard.ZstdCompressor().compress(GOOD * 100)[:-3],
        "truncated file",
        "cut.jsonl.zst",
    ),
    "cut.jsonl.gz": (gzip.compress(GOOD * 2, mtime=0)[:-3], "damaged file", "cut.jsonl.gz"),
    "latin.txt": (b"\xe9", "invalid UTF-8", "latin.txt"),
    "noise.parquet": (b"PAR1" + bytes(50), "damaged file", "noise.parquet"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_bad_records_are_named_or_counted(tmp_path, prepare, name):
    data, reason, words = BAD_RECORDS[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    asked = arguments([tmp_path / name, tmp_path / "good.jsonl"], tmp_path / "out")
    refused(prepare(asked), words)
    assert not list((tmp_path / "out").glob("shard-*"))
    out = accepted(prepare([*asked, "--on_bad_record=skip"]))
    text = PreparedText(tmp_path / "out")
    assert text.index["left_out"] == {reason: 1}
    what = "the rest of 1 file" if reason.endswith("file") else "1 document"
    assert f"left out: {what}: {reason}\n" in out
    kept = 1 if name in ("latin.txt", "noise.parquet") else 3
    assert [BYTES.decode(tokens) for tokens in text.documents(1)] == ["good"] * kept


def test_nul_bytes_are_text_and_empty_documents_are_counted(tmp_path, prepare):
    texts = ["a\0b", "", "\0", "x", ""]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts) + b"\n  \n")
    (tmp_path / "b.txt").write_bytes(b"")
    files = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    out = accepted(prepare(arguments(files, tmp_path / "some")))
    assert "left out: 3 documents: empty\n" in out
    text = PreparedText(tmp_path / "some")
    assert [BYTES.decode(tokens) for tokens in text.documents(1)] == ["a\0b", "\0", "x"]
    assert text.index["left_out"] == {"empty": 3}
    accepted(prepare(arguments(files, tmp_path / "short", "--min_characters=2")))
    text = PreparedText(tmp_path / "short")
    assert text.index["left_out"] == {"empty": 3, "under 2 characters": 2}


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.jsonl", json_lines(["", ""])),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl.zst", b""),
        ("a.txt", b""),
    ],
)
@pytest.mark.parametrize("more", [[], ["--deduplicate", "--packing=published", "--block_tokens=8"]])
def test_no_text_at_all_is_refused(tmp_path, prepare, name, data, more):
    (tmp_path / name).write_bytes(data)
    refused(prepare(arguments([tmp_path / name], tmp_path / "out", *more)), "--input holds no text")


def test_an_output_begun_with_other_options_or_input_is_refused_and_kept(tmp_path, files, prepare):
    """Both a complete folder and an interrupted one."""
    model = tmp_path / "tokenizer.model"
    model.write_bytes(sentencepiece_model())
    done, begun = (
        arguments(files, tmp_path / name, "--shard_characters=900") for name in ("done", "begun")
    )
    accepted(prepare(done))
    whole = contents(tmp_path / "done")
    shutil.copytree(tmp_path / "done", tmp_path / "begun")
    (tmp_path / "begun" / "index.json").unlink()
    shutil.rmtree(min((tmp_path / "begun").glob("shard-*")))
    before = {path: time for path, time in touched(tmp_path).items() if "shard-" in path}
    for command in (done, begun):
        for flag, key in (
            ("--append_eos=false", "append_eos=True, not False"),
            ("--seed=1", "seed=0, not 1"),
            ("--shard_characters=901", "shard_characters=900, not 901"),
            ("--deduplicate", "deduplicate=False, not True"),
            (f"--tokenizer={model}", "tokenizer="),
            (f"--input={files[0]}", "input 1="),
            (f"--input={files[1]},{files[0]}", "input 0="),
        ):
            refused(prepare([*command, flag]), f"was begun with {key}")
        data = files[1].read_bytes()
        files[1].write_bytes(data.replace(b"e", b"i", 1))
        refused(prepare(command), f"the content of {files[1]}")
        # The content is as before, only the time differs.
        files[1].write_bytes(data)
    assert {path: time for path, time in touched(tmp_path).items() if "shard-" in path} == before
    assert contents(tmp_path / "done") == whole
    assert "there is nothing to do" in accepted(prepare(done))
    assert "there is nothing to do" in accepted(prepare([*done, "--on_bad_record=skip"]))
    assert contents(tmp_path / "done") == whole
    accepted(prepare(begun))
    assert finished(tmp_path / "begun") == finished(tmp_path / "done")


def test_a_folder_without_results_takes_other_options(tmp_path, files, prepare):
    asked = arguments(files[:1], tmp_path / "out")
    refused(prepare([*asked, "--text_field=body", "--deduplicate"]), "no field 'body'")
    accepted(prepare(asked))
    prepared(tmp_path / "loop", files[:1])
    assert finished(tmp_path / "out") == contents(tmp_path / "loop")


def test_the_same_command_mends_a_damaged_output(tmp_path, files, prepare):
    asked = arguments(files, tmp_path / "out", "--shard_characters=900")
    accepted(prepare(asked))
    whole = finished(tmp_path / "out")
    shard = min((tmp_path / "out").glob("shard-*"))
    for name in ("pages.npy", "documents.npy"):
        (shard / name).write_bytes(b"")
        with pytest.raises(UserError, match="delete this folder, and give the command"):
            list(PreparedText(tmp_path / "out").documents(1))
        assert "is no longer complete" in accepted(prepare(asked))
        assert finished(tmp_path / "out") == whole
    # A truncated file is also found without the index.
    pages = (shard / "pages.npy").read_bytes()
    (shard / "pages.npy").write_bytes(pages[: len(pages) * 2 // 3])
    (tmp_path / "out" / "index.json").unlink()
    accepted(prepare(asked))
    assert finished(tmp_path / "out") == whole
    for name in (shard.name, "tokenizer", "index.json"):
        path = tmp_path / "out" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        accepted(prepare(asked))
        assert finished(tmp_path / "out") == whole


INPUTS = {"options": {}, "tokenizer": "", "files": [], "states": []}


def test_a_damaged_inputs_json_is_one_line(tmp_path, files, prepare):
    damaged = [b"", b"\xff", b"{}", b"[]", b"null", b"1"]
    for key in INPUTS:
        others = [INPUTS | {key: wrong} for wrong in (None, [], 5, ["x"])]
        others.append({name: value for name, value in INPUTS.items() if name != key})
        damaged += [json.dumps(other).encode() for other in others]
    note = tmp_path / "out" / "inputs.json"
    (tmp_path / "out" / "shard-00000-of-00001").mkdir(parents=True)
    for data in damaged:
        print(data)
        note.write_bytes(data)
        refused(prepare(arguments(files, tmp_path / "out")), str(tmp_path / "out"))
        assert note.read_bytes() == data


def test_an_output_with_only_the_first_files_of_a_killed_command_is_accepted(
    tmp_path, files, prepare
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lock").touch()
    (tmp_path / "out" / "inputs.json.4711.tmp").write_text('{"opti')
    accepted(prepare(arguments(files, tmp_path / "out")))


def test_an_output_with_only_files_of_somebody_else_is_refused_and_kept(tmp_path, files, prepare):
    for number, name in enumerate(("lock", "inputs.json.mine")):
        output = tmp_path / f"out{number}"
        output.mkdir()
        (output / name).write_text("precious")
        refused(prepare(arguments(files, output)), f"--output={output}")
        assert contents(output) == {name: b"precious"}


def test_names_that_are_not_valid_utf8_are_read_and_refused_as_output(tmp_path, prepare):
    odd = os.fsdecode(b"\xff.jsonl")
    (tmp_path / odd).write_bytes(json_lines(["one", "two"]))
    accepted(prepare(arguments([tmp_path / odd], tmp_path / "out")))
    output = tmp_path / os.fsdecode(b"\xff")
    refused(prepare(arguments([tmp_path / odd], output)), "is not valid UTF-8", r"\udcff")
    assert not output.exists()


def with_other_letters(data: bytes, part: slice) -> bytes:
    """A text of the same size, and of the same first and last bytes, that differs in a part."""
    return data[: part.start] + data[part].replace(b"sheep", b"goats") + data[part.stop :]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["of a shard that is made", "of a shard that is missing"])
@pytest.mark.parametrize("was_complete", [False, True])
def test_a_change_within_a_file_after_the_first_pass_is_refused(
    text, was_complete, tmp_path, prepare
):
    """Its signature, of its size and of its first and last MiB, does not change."""
    file, output = tmp_path / "a.jsonl", tmp_path / "out"
    data = json_lines(f"here are {number} sheep " * 150 for number in range(2000))
    file.write_bytes(data)
    asked = arguments([file], output, "--shard_characters=900000")
    accepted(prepare(asked))
    whole = finished(output)
    shards = sorted(output.glob("shard-*"))
    assert len(shards) > 3
    is_made = text == "of a shard that is made"
    shutil.rmtree(shards[0 if is_made else len(shards) // 2])
    if not was_complete:
        (output / "index.json").unlink()
        laid_out(output, [file], options(shard_characters=900_000))
    file.write_bytes(with_other_letters(data, slice(len(data) // 2, len(data) * 6 // 10)))
    left = set(output.glob("shard-*"))
    if is_made and was_complete:
        # The missing shard is as it was, so that the output is.
        accepted(prepare(asked))
    else:
        refused(prepare(asked), "changed: delete" if was_complete else f"{file} has changed since")
        assert set(output.glob("shard-*")) == left
        file.write_bytes(data)
        accepted(prepare(asked))
    assert finished(output) == whole


def test_a_task_ends_when_the_marker_of_its_run_is_gone(tmp_path):
    """The workers of a running cluster outlive a command that was killed."""
    with pytest.raises(Stopped):
        Reporter(tmp_path / "run-1")(1, 2, 3)


@pytest.mark.slow
def test_the_files_have_the_permissions_of_the_umask(tmp_path, files):
    run(PREPARE, *arguments(files, tmp_path / "out"), umask=0o077)
    paths = list((tmp_path / "out").rglob("*"))
    assert len(paths) > 5 and not [path for path in paths if path.stat().st_mode & 0o077]


def test_a_folder_locked_by_another_process_is_refused(tmp_path, files, prepare):
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(
            prepare(arguments(files, tmp_path / "out")), "is in use: another process writes to it"
        )
    assert contents(tmp_path / "out") == {"lock": b""}
    accepted(prepare(arguments(files, tmp_path / "out")))


def test_only_own_intermediate_files_are_deleted_and_none_of_another_process(
    tmp_path, files, prepare
):
    """A folder that is mended deletes its intermediate files, too."""
    output, work = tmp_path / "out", tmp_path / "out" / "work"
    command = arguments(files, output)
    accepted(prepare(command))
    assert not work.exists()
    (work / "dask").mkdir(parents=True)
    for name in ("notes.txt", "checked.json", "copies.rows", "digests-00000-00000.json"):
        (work / name).touch()
    everything = touched(work)
    with owned(output, "--output"):
        assert "there is nothing to do" in accepted(prepare(command))
    assert touched(work) == everything
    for words in ("there is nothing to do", "rebuilding the missing parts"):
        assert words in accepted(prepare(command))
        assert [path.name for path in work.iterdir()] == ["notes.txt"]
        shutil.rmtree(min(output.glob("shard-*")))


def test_a_full_disk_is_one_line_and_the_preparation_can_be_resumed(tmp_path, files, monkeypatch):
    asked = options(shard_characters=900)
    layout = laid_out(tmp_path / "out", files, asked)
    runs = [(number, number + 1) for number in range(layout.num_shards)]
    written, sync = [], os.fsync

    def full(descriptor):
        written.append(descriptor)
        if len(written) > 11:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"shard-00003.* cannot be written: No space left"):
            for place in runs:
                make_shards.make_shards(tmp_path / "out", layout.work, asked, no_report, place)
    assert make_shards.pending(tmp_path / "out", len(runs)) == list(range(3, len(runs)))
    assert not list(layout.work.glob("shard-*"))
    prepared(tmp_path / "out", files, shard_characters=900)
    prepared(tmp_path / "loop", files, shard_characters=900)
    assert contents(tmp_path / "out") == contents(tmp_path / "loop")


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [0.1, 0.6, 1.5])
def test_a_full_file_system_is_one_line(tmp_path, megabytes):
    (tmp_path / "a.jsonl").write_bytes(json_lines(random_texts(5, 8000)))
    mount = f"mount -t tmpfs -o size={int(megabytes * 2**20)} none {tmp_path / 'disk'} && "
    (tmp_path / "disk").mkdir()
    in_namespace = ["unshare", "-rm", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*in_namespace, mount + "true"]).returncode
    ):
        pytest.skip("needs to mount a small file system")
    asked = arguments([tmp_path / "a.jsonl"], tmp_path / "disk" / "out", "--workers=1")
    asked += ["--shard_characters=100000", "--deduplicate"]
    command = " ".join([sys.executable, "-m", PREPARE, *asked])
    done = subprocess.run(
        [*in_namespace, f"{mount} {command}"], cwd=ROOT, capture_output=True, text=True
    )
    refused(
        (done.returncode, done.stdout, done.stderr), "cannot be written", str(tmp_path / "disk")
    )


def most_memory(command: subprocess.Popen) -> int:
    """Waits for a command to end; returns the peak memory of its largest process, in bytes."""
    most = 0
    while command.poll() is None:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            for process in [psutil.Process(command.pid), *workers_of(command)]:
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                most = max(most, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        time.sleep(0.02)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("name, megabytes", [("a.jsonl", 300), ("a.jsonl.zst", 1000)])
def test_a_line_longer_than_the_limit_is_counted_in_little_memory(tmp_path, name, megabytes):
    assert files_lib.MOST_BYTES < 300 * 2**20
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(tmp_path / name, "wb"))
        if name.endswith(".zst"):
            file = stack.enter_context(zstandard.ZstdCompressor().stream_writer(file))
        file.write(GOOD + b'{"text": "')
        for _ in range(megabytes):
            file.write(b"x" * 2**20)
        file.write(b'"}\n' + GOOD)
    asked = arguments([tmp_path / name], tmp_path / "out", "--workers=1", "--on_bad_record=skip")
    command = start(PREPARE, *asked)
    memory = most_memory(command)
    out, err = command.communicate()
    assert command.returncode == 0, err
    assert "left out: 1 document: long line" in out
    text = PreparedText(tmp_path / "out")
    assert text.index["left_out"] == {"long line": 1} and text.num_documents == 2
    assert memory < 1.5e9, memory


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_randomly_damaged_file_is_refused_or_gives_the_documents_of_read_documents(
    tmp_path, name, mode
):
    rng, texts = random.Random(name + mode), random_texts(6, 12)
    path, reading = tmp_path / name, Reading("text", on_bad_record="skip")
    packers = {
        "gz": lambda data: gzip.compress(data, mtime=0),
        "zst": lambda data: frames(data, 400),
        "jsonl": bytes,
    }
    if path.suffix == ".parquet":
        write_parquet(path, texts)
    else:
        path.write_bytes(packers[path.suffix[1:]](json_lines(texts)))
    whole = path.read_bytes()
    outcomes: collections.Counter = collections.Counter()
    for number in range(40):
        bad = bytearray(whole)
        if rng.random() < 0.3:
            bad = bad[: rng.randrange(len(bad))]
        else:
            for _ in range(rng.randint(1, 3)):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        path.write_bytes(bad)
        try:
            text = prepared(
                tmp_path / str(number), [path], on_bad_record=mode, shard_characters=400
            )
        except UserError as error:
            assert "\n" not in str(error)
            assert str(path) in str(error) or str(error) == "--input holds no text"
            outcomes["refused"] += 1
            continue
        found = read_documents([str(path)], "--input", reading, collections.Counter())
        assert [BYTES.decode(tokens) for tokens in text.documents(1)] == [d.text for d in found]
        outcomes["read"] += 1
    assert outcomes["read"] > 0 and sum(outcomes.values()) == 40
