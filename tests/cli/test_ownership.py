"""A folder has one owner: a second process is refused, and the folder of a killed one is taken over. Real processes."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from calm_jax.cli import ownership
from calm_jax.cli.files import atomic_folder
from calm_jax.cli.output import owned_file
from calm_jax.cli.ownership import is_foreign, owned
from calm_jax.errors import UserError
from tests.workdirs import ROOT

OWN = """
import pathlib, sys, time
from calm_jax.cli.files import atomic_folder
from calm_jax.cli.output import owned_file
from calm_jax.cli.ownership import owned
kind, path = sys.argv[1], pathlib.Path(sys.argv[2])
own = {
    "owned": lambda: owned(path, f"--flag={path}"),
    "atomic_folder": lambda: atomic_folder(path, "--flag"),
    "owned_file": lambda: owned_file(path, "--flag", overwrite=False),
}[kind]
with own() as folder:
    if kind != "owned_file":
        (path if kind == "owned" else folder).joinpath("half").write_text("written")
    print("owns it", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def owner(kind: str, path):
    """A process that owns a folder, and is killed at the end."""
    command = [sys.executable, "-c", OWN, kind, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "owns it\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["owned", "atomic_folder"])
def test_a_second_process_is_refused_and_a_killed_one_replaced(kind, tmp_path):
    path = tmp_path / "new" / "folder"
    own = {"owned": owned, "atomic_folder": lambda *_: atomic_folder(path, "--flag")}[kind]
    with owner(kind, path) as process:
        # A stopped process, too, is an owner: it may go on.
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(UserError) as refused, own(path, f"--flag={path}"):
                pass
            expected = (
                rf"--flag={path} is in use: process {process.pid} on {socket.gethostname()} since [-\d]+ [:\d]+ UTC "
                "writes to it; wait for its end, stop it, or give another folder"
            )
            assert re.fullmatch(expected, str(refused.value))
    with own(path, f"--flag={path}") as folder:
        if kind == "owned":
            assert set(os.listdir(path)) == {"half", "lock"}
            (path / "half").unlink()
        else:
            assert os.listdir(folder) == ["lock"]
            (folder / "whole").touch()
    # The killed process made the folder, so that it stays, with an empty lock that nobody has to delete.
    left = {"owned": ["lock"], "atomic_folder": ["whole"]}[kind]
    assert os.listdir(path) == left and os.listdir(path.parent) == ["folder"]


def test_a_file_that_another_process_is_to_write_is_refused_and_then_that_it_exists(tmp_path):
    path = tmp_path / "texts.jsonl"
    with owner("owned_file", path) as process:
        with (
            pytest.raises(UserError, match=f"is in use: process {process.pid} on "),
            owned_file(path, "--flag", overwrite=True),
        ):
            pass
        assert os.listdir(tmp_path) == [".texts.jsonl.unfinished"]
    with owned_file(path, "--flag", overwrite=False):
        path.write_text("whole")
    assert os.listdir(tmp_path) == ["texts.jsonl"]
    with (
        pytest.raises(UserError, match=r"--flag=.* already exists"),
        owned_file(path, "--flag", overwrite=False),
    ):
        pass
    assert os.listdir(tmp_path) == ["texts.jsonl"] and path.read_text() == "whole"


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), owned(tmp_path / "a" / "b", "--flag"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "a" / "b", "--flag") as folder:
        (folder / "half").touch()
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("change", ["nothing", "deleted", "moved", "replaced", "a file"])
def test_an_owner_can_see_that_its_folder_is_gone(change, tmp_path):
    path = tmp_path / "folder"
    with owned(path, f"--flag={path}") as check:
        check()
        if change == "moved":
            path.rename(tmp_path / "other")
        elif change != "nothing":
            shutil.rmtree(path)
        if change == "replaced":
            path.mkdir()
            (path / "lock").touch()
        elif change == "a file":
            path.touch()
        if change == "nothing":
            check()
        else:
            with pytest.raises(UserError, match=rf"^--flag={path} was deleted, moved or replaced"):
                check()


def test_a_folder_that_is_deleted_while_it_is_locked_is_an_error_of_one_line(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_sign", lambda lock: shutil.rmtree(folder))
        error = pytest.raises(UserError, match="--flag cannot be written: No such file")
        with error, owned(folder, "--flag"):
            pass
    with owned(folder, "--flag"):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"^--flag cannot be written: "),
        owned(tmp_path / "file" / "folder", "--flag"),
    ):
        pass


def test_a_file_system_without_locks_is_named_and_no_obstacle(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with owned(tmp_path / "folder", "--flag=folder"):
        (tmp_path / "folder" / "file").touch()
    err = capsys.readouterr().err
    assert (
        err
        == "note: --flag=folder is on a file system without locks: let no other command write to it\n"
    )
    with pytest.raises(ZeroDivisionError), owned(tmp_path / "other", "--flag"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize(
    "content",
    [
        "precious",
        "process 7 on a\nprecious",
        "process 7 on a list of mine",
        "process 7 on a since 2026-01-02 03:04:05 UTC, mine",
        "process " + "7" * 500,
        "\0" * 201,
    ],
)
@pytest.mark.parametrize("locks", [True, False])
def test_a_file_named_lock_that_is_somebody_elses_is_kept(locks, content, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not locks:
        monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / "mine").write_text(content)
    os.link(tmp_path / "mine", tmp_path / "lock")
    with (
        pytest.raises(UserError, match=r"^--flag cannot be written: .*lock is no lock of calm_jax"),
        owned(tmp_path, "--flag"),
    ):
        pass
    assert (tmp_path / "mine").read_text() == (tmp_path / "lock").read_text() == content


def test_the_lock_of_a_killed_command_is_taken_over(tmp_path):
    """After a power cut only a beginning of its content may be left, and zeros."""
    content = b"process 7 on a-b.example since 2026-01-02 03:04:05 UTC"
    (tmp_path / "half").touch()
    for size in range(len(content) + 1):
        for left in (content[:size], content[:size].ljust(len(content), b"\0")):
            (tmp_path / "lock").write_bytes(left)
            assert not is_foreign(tmp_path)
            with owned(tmp_path, "--flag"):
                assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
            assert (tmp_path / "lock").read_bytes() == b""


@pytest.mark.parametrize("lock", [None, "mine"])
def test_a_folder_of_somebody_else_where_a_new_one_is_made_is_kept(lock, tmp_path):
    unfinished = tmp_path / ".new.unfinished"
    unfinished.mkdir()
    (unfinished / "file").write_text("precious")
    if lock:
        (unfinished / "lock").write_text(lock)
    before = sorted(os.listdir(unfinished))
    refused = pytest.raises(
        UserError, match=r"\.new\.unfinished, .* holds files that no command left"
    )
    with refused, atomic_folder(tmp_path / "new", "--target"):
        pass
    assert sorted(os.listdir(unfinished)) == before
    assert (unfinished / "file").read_text() == "precious"


def test_what_is_written_while_a_folder_is_deleted_is_deleted_after_it(tmp_path, monkeypatch):
    """A thread's write just before the folder would be gone, twice."""
    remove, calls = pathlib.Path.rmdir, []

    def write_and_remove(path):
        calls.append(path)
        if len(calls) <= 2:
            (path / "late").touch()
        remove(path)

    monkeypatch.setattr(pathlib.Path, "rmdir", write_and_remove)
    with pytest.raises(UserError, match="disk"), atomic_folder(tmp_path / "new", "--target"):
        raise UserError("the disk is full")
    assert os.listdir(tmp_path) == [] and len(calls) >= 3


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1, 0.5])
def test_what_a_thread_still_writes_after_an_error_is_no_obstacle_to_the_next_command(
    seconds, tmp_path
):
    """As threads of Orbax do where the disk is full: they make the folder again after it was deleted."""
    ended = threading.Event()

    def write(folder):
        ended.wait()
        last = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                (folder / "lm").mkdir(parents=True, exist_ok=True)
                (folder / "lm" / "array").write_text("late")
            if time.monotonic() > last:
                return

    with pytest.raises(UserError, match="disk"), atomic_folder(tmp_path / "new", "--target") as one:
        late = threading.Thread(target=write, args=(one,))
        late.start()
        ended.set()
        raise UserError("the disk is full")
    late.join()
    with atomic_folder(tmp_path / "new", "--target") as one:
        (one / "file").write_text("whole")
    assert os.listdir(tmp_path) == ["new"]
    assert os.listdir(tmp_path / "new") == ["file"]
