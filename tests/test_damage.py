"""`python -m benchmarks.damage`: a short campaign over all readers, and that it finds faults."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.damage import campaign, damages
from benchmarks.damage.readers import READERS, Reader
from calm_jax.cli import files
from calm_jax.cli.files import read_file, read_json, read_text
from calm_jax.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent


def faults(name: str, folder, numbers) -> list[campaign.Case]:
    cases = list(campaign.run(name, folder, 0, numbers))
    assert [case.number for case in cases] == list(numbers)
    return [case for case in cases if case.outcome not in campaign.GOOD]


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_read_or_refused_in_one_line(name, tmp_path):
    """By the command, as JAX does not work in a process that is forked from one that has used it."""
    times = 20 if READERS[name].share < 1 else 60
    options = (f"--folder={tmp_path}", f"--times={times}", f"--readers={name}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.damage", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name}: {times} cases, 0 faults" in done.stdout


def _write(folder) -> None:
    (folder / "a.json").write_text(json.dumps({"a": list(range(50))}))


def careless(folder):
    return json.loads((folder / "a.json").read_text())


def careful(folder):
    try:
        return read_json(folder / "a.json")
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} cannot be read ({error})") from error


def violent(folder):
    if careful(folder) != {"a": list(range(50))}:
        os.kill(os.getpid(), signal.SIGKILL)


def endless(folder):
    if careful(folder) != {"a": list(range(50))}:
        time.sleep(600)


def writing(folder):
    if careful(folder) != {"a": list(range(50))}:
        (folder.parent / "outside" / "written").touch()


@pytest.mark.parametrize(
    "read, is_checked, expected",
    [
        (careful, False, set()),
        (careful, True, {"wrong result"}),
        (violent, False, {"ends the process"}),
        (endless, False, {"hangs"}),
        (writing, False, {"something was written"}),
    ],
)
def test_faults_of_a_reader_are_found(read, is_checked, expected, tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "toy", Reader(_write, read, is_checked=is_checked))
    monkeypatch.setattr(campaign, "_MOST_SECONDS", 1.0)
    # Numbers in a list, which a reader without checksums cannot miss.
    monkeypatch.setattr(damages, "OF_BYTES", {"value": damages.OF_BYTES["value"]})
    monkeypatch.setattr(damages, "OF_FILES", ())
    found = faults("toy", tmp_path, range(4))
    assert {case.outcome for case in found} == expected
    assert len(found) == (4 if expected else 0)


def test_a_reader_without_checks_fails_in_many_ways(tmp_path, monkeypatch):
    monkeypatch.setitem(READERS, "toy", Reader(_write, careless))
    monkeypatch.setattr(campaign, "_MOST_SECONDS", 3.0)
    found = {case.outcome for case in faults("toy", tmp_path, range(60))}
    assert {"JSONDecodeError", "RecursionError", "UnicodeDecodeError", "hangs"} <= found


def test_a_case_is_the_same_each_time(tmp_path):
    once, again = (
        [
            dataclasses.replace(case, seconds=0.0, detail="")
            for case in campaign.run("pickles", folder, 7, range(8))
        ]
        for folder in (tmp_path / "a", tmp_path / "b")
    )
    assert once == again
    assert len({case.kind for case in once}) > 3


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
    monkeypatch.setattr(files, "_MOST_BYTES", 2**21)
    with pytest.raises(UserError, match="--flag='/dev/zero' has more than 2 MiB"):
        read_text("/dev/zero", "--flag")
