"""A conversion or an export that fails leaves nothing behind, and never touches a folder that exists."""

import errno
import os

import numpy as np
import pytest

from calm_jax.cli.files import refuse_existing
from calm_jax.errors import Interrupted
from calm_jax.interop import names
from calm_jax.interop.converted import convert
from calm_jax.interop.exported import export
from tests.interop.checkpoints import changed, listing, refusal
from tests.interop.conversions import params


@pytest.mark.slow
def test_an_existing_folder_or_file_is_refused_and_unchanged(golden, converted, tmp_path):
    target = tmp_path / "converted"
    target.mkdir()
    (target / "mine").write_text("text")
    assert str(target) in refusal(converted, golden / "ar")
    assert listing(tmp_path) == ["converted", "converted/mine"]
    (target / "mine").unlink()
    assert params(converted(golden / "ar"))
    assert str(target) in refusal(converted, golden / "ar")
    file = tmp_path / "file"
    file.write_text("text")
    assert str(file) in refusal(converted, golden / "ar", name="file")
    assert file.read_text() == "text"


def test_a_symbolic_link_as_target_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert "already exists" in refusal(refuse_existing, tmp_path / "link")


@pytest.mark.slow
def test_damage_in_the_last_tensor_leaves_nothing(golden, converted, tmp_path):
    last = "generative_head.net.final_layer.linear.bias"

    def change(tensors):
        tensors[last][0] = np.nan

    source = changed(golden / "flow", tmp_path / "source", {}, change)
    before = listing(tmp_path)
    assert last in refusal(converted, source)
    assert listing(tmp_path) == before


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(golden, plan_of, monkeypatch, tmp_path):
    plan = plan_of(golden / "energy_k4")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, name in (
        ("calm_jax.training.checkpoint.ocp.CheckpointManager", "save"),
        ("calm_jax.training.checkpoint.ocp.CheckpointManager", "wait_until_finished"),
        ("calm_jax.data.tokenizers.Tokenizer", "save"),
        ("os", "fsync"),
        ("pathlib.Path", "rename"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"{place}.{name}", full)
            line = refusal(convert, plan, tmp_path / "target")
        assert os.strerror(errno.ENOSPC) in line, name
        assert listing(tmp_path) == [], name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [0, 40])
def test_an_interrupted_conversion_leaves_nothing(
    kind, after, golden, plan_of, monkeypatch, tmp_path
):
    plan, read, count = plan_of(golden / "energy_k2"), names.read_parameter, iter(range(99))

    def interrupted(*arguments):
        if next(count) == after:
            raise kind("now")
        return read(*arguments)

    monkeypatch.setattr(names, "read_parameter", interrupted)
    with pytest.raises(kind):
        convert(plan, tmp_path / "target")
    assert listing(tmp_path) == []


@pytest.mark.slow
def test_an_export_that_fails_leaves_nothing(golden, converted, monkeypatch, tmp_path):
    workdir = converted(golden / "energy_k4")
    before = listing(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupted(*_, **__):
        raise Interrupted("now")

    for place, name in (("safetensors.numpy", "save_file"), ("pathlib.Path", "write_bytes")):
        with monkeypatch.context() as patched:
            patched.setattr(f"{place}.{name}", full)
            line = refusal(export, workdir, tmp_path / "out", "x")
        assert os.strerror(errno.ENOSPC) in line and listing(tmp_path) == before
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", interrupted)
        with pytest.raises(Interrupted):
            export(workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("text")
    assert str(tmp_path / "out") in refusal(export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path / "out") == ["mine"]
