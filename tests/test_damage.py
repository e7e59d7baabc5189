"""`python -m benchmarks.damage`: a short campaign over all readers, and that it finds faults."""

import ast
import json
import random

import pytest

from benchmarks.damage import damages
from benchmarks.damage.campaign import GOOD, numbers_of
from benchmarks.damage.readers import READERS
from calm_jax.cli.files import read_file, read_text
from calm_jax.errors import UserError
from tests import forked
from tests.damage_toys import TOYS
from tests.workdirs import run


def cases(folder, *options: str) -> list[dict]:
    """The cases of the command, which must find no fault."""
    run("benchmarks.damage", f"--folder={folder}", *options)
    return read_cases(folder)


def read_cases(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def campaigns(tmp_path_factory) -> dict[str, tuple[int, list[dict]]]:
    """For each reader how many cases it must have, and its cases: one command for all fast readers, and one for the slow ones."""
    found = {}
    for is_slow in (False, True):
        names = [name for name, reader in READERS.items() if (reader.share < 1) == is_slow]
        times = int((40 if is_slow else 60) * sum(READERS[name].share for name in names))
        folder = tmp_path_factory.mktemp("campaign")
        options = (f"--folder={folder}", f"--times={times}", f"--readers={','.join(names)}")
        status, out, err = forked.run(("benchmarks.damage", *options), timeout=1500)
        # Status 1 means that there are faults.
        assert status in (0, 1), out + err
        every = read_cases(folder)
        for name, number in numbers_of(names, times).items():
            found[name] = number, [case for case in every if case["reader"] == name]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_read_or_refused_in_one_line(name, campaigns):
    number, found = campaigns[name]
    assert [case["number"] for case in found] == [*range(number)] and number >= 8
    assert not [case for case in found if case["outcome"] not in GOOD]


@pytest.mark.slow
def test_bad_input_of_the_command_is_one_line(tmp_path):
    folder = f"--folder={tmp_path}"
    line = run("benchmarks.damage", folder, "--case=pickles:x", status=2)
    assert line == "error: --case=pickles:x must be READER:NUMBER, such as pickles:0"
    (tmp_path / "cases.jsonl").write_text('{"reader": "pickles", "num')
    line = run("benchmarks.damage", folder, status=2)
    assert "cases.jsonl: line 1 is no case: delete the line, and the case runs again" in line
    line = run("benchmarks.damage", folder, "--seed=1", status=2)
    assert f"--seed=1: the cases in {tmp_path} have the seed 0: give that one" in line


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The cases of each toy reader."""
    out = run("tests.damage_toys", str(tmp_path_factory.mktemp("toys")))
    found = [json.loads(line) for line in out.splitlines()]
    return {name: [case for case in found if case["reader"] == name] for name in TOYS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, expected",
    [
        ("careful", "other"),
        ("checked", "wrong result"),
        ("violent", "ends the process"),
        ("endless", "hangs"),
        ("writing", "something was written"),
        ("printing", "an error is printed"),
    ],
)
def test_faults_of_a_reader_are_found(name, expected, toys):
    assert [case["number"] for case in toys[name]] == [*range(4)]
    assert {case["outcome"] for case in toys[name]} == {expected}


@pytest.mark.slow
def test_a_reader_without_checks_fails_in_many_ways(toys):
    found = {case["outcome"] for case in toys["careless"]}
    assert {"JSONDecodeError", "RecursionError", "UnicodeDecodeError", "hangs"} <= found


@pytest.mark.slow
def test_files_that_are_written_where_damaged_paths_lead_are_found(toys):
    """Up to four folders above the input's, at an absolute path, and behind a link, which lead to the working folder."""
    written = [ast.literal_eval(case["detail"]) for case in toys["unzipping"] if case["detail"]]
    found = {name for names in written for name in names if name.endswith("written")}
    assert found == {f"{'inner/' * depth}outside/written" for depth in range(4)}
    # What a case wrote is removed before the next one.
    assert all(sum(name.endswith("written") for name in names) <= 1 for names in written)


def test_json_values_are_drawn_anew_and_are_the_same_for_the_same_seed():
    drawn = [
        [json.dumps(damages.json_value(random.Random(f"{n}"))) for n in range(250)]
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 100


@pytest.mark.slow
def test_a_case_is_the_same_each_time(tmp_path):
    once, again = (
        [
            case | {"seconds": 0.0, "detail": ""}
            for case in cases(tmp_path / name, "--readers=pickles", "--times=8", "--seed=7")
        ]
        for name in ("a", "b")
    )
    assert once == again
    assert len({case["kind"] for case in once}) > 3


def test_only_regular_files_of_bounded_size_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert read_file(path) == b"abc"
    with pytest.raises(OSError, match="3 bytes, and at most 2"):
        read_file(path, 2)
    for kind in ("pipe", "endless", "folder"):
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_bytes(b"")
        damages.replace(path, kind, [path], damages.random.Random(0))
        with pytest.raises(OSError):
            read_file(path)
    with pytest.raises(UserError, match="--flag='/dev/zero' has more than 2 MiB"):
        read_text("/dev/zero", "--flag", 2**21)
