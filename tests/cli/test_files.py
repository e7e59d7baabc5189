"""Files are written whole, and only in their own folder: a link, a pipe or a cut line that lies there changes nothing else."""

import errno
import json
import os

import pytest

from calm_jax.cli.files import append_line, atomic_folder, write_atomically
from calm_jax.errors import UserError


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_a_file_is_written_beside_links_and_pipes_of_somebody_else(kind, tmp_path):
    other, folder = tmp_path / "other", tmp_path / "folder"
    folder.mkdir()
    if kind == "pipe":
        os.mkfifo(folder / "file.tmp")
    else:
        (folder / "file.tmp").symlink_to(other)
    if kind == "link":
        other.write_text("precious")
    write_atomically(folder / "file", "new")
    assert not (folder / "file").is_symlink() and (folder / "file").read_text() == "new"
    assert os.listdir(folder) == ["file"]
    assert (other.read_text() if other.exists() else "nothing") == (
        "precious" if kind == "link" else "nothing"
    )


def test_a_file_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"/file cannot be written: No space left on device"):
        write_atomically(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_appended_to_what_is_no_file(kind, tmp_path):
    (tmp_path / "other").write_text("precious")
    path = tmp_path / "lines"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        append_line(path, "{}")
    assert (tmp_path / "other").read_text() == "precious"


def test_a_line_that_a_full_disk_cut_does_not_take_the_next_one_with_it(tmp_path):
    path = tmp_path / "lines"
    append_line(path, '{"n": 0}')
    path.write_bytes(path.read_bytes() + b'{"n": 1')
    for number in (2, 3):
        append_line(path, json.dumps({"n": number}))
    assert path.read_text() == '{"n": 0}\n{"n": 1\n{"n": 2}\n{"n": 3}\n'


def test_a_folder_is_not_made_through_a_link(tmp_path):
    """It would delete what the link leads to."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("precious")
    (tmp_path / ".new.unfinished").symlink_to(other)
    refused = pytest.raises(UserError, match=r"\.new\.unfinished, .* is a symbolic link: delete it")
    with refused, atomic_folder(tmp_path / "new", "--target"):
        pass
    assert os.listdir(other) == ["file"] and not (tmp_path / "new").exists()
