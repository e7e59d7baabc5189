"""Where a checkpoint comes from: a folder, or a repository of the Hugging Face hub."""

import huggingface_hub
import pytest

from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.interop.source import folder_of
from tests.interop.checkpoints import changed, refusal
from tests.interop.conversions import params
from tests.interop.weight_files import SAFE


def test_a_download_without_a_network_is_refused_in_one_line(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no\nroute\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    line = refusal(folder_of, "cccczshao/CALM-M", "--source")
    assert "--source='cccczshao/CALM-M'" in line and "no route to host" in line


@pytest.mark.parametrize("source", ["nowhere", "a/b/c", "../up", "/abs/olute", "a/..", "./x", ""])
def test_a_source_that_is_neither_folder_nor_repository_is_refused_without_network(
    source, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)

    def never(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    if source:
        assert repr(source) in refusal(folder_of, source, "--source")
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    assert "is a file" in refusal(folder_of, str(file), "--source")


@pytest.mark.slow
def test_a_repository_is_downloaded_and_converted(golden, converted, monkeypatch, tmp_path):
    asked = []

    def download(name, revision, allow_patterns):
        assert revision is None
        asked.append((name, allow_patterns))
        return str(golden / "ae_k4")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    workdir = converted(folder_of("cccczshao/CALM-M", "--source"))
    assert params(workdir)
    ((name, patterns),) = asked
    # Pickled weights are not downloaded if the repository has safetensors.
    assert name == "cccczshao/CALM-M" and not any("bin" in pattern for pattern in patterns)


def test_pickles_are_downloaded_only_without_safetensors(golden, monkeypatch, tmp_path):
    folder = changed(golden / "ae_k4", tmp_path / "pickled")
    (folder / SAFE).unlink()
    asked = []

    def download(name, revision, allow_patterns):
        asked.append((revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert folder_of("cccczshao/CALM-M", "--source", "v1") == folder
    assert len(asked) == 2 and "pytorch_model*.bin" in asked[1][1]
    assert [revision for revision, _ in asked] == ["v1", "v1"]


def test_a_revision_of_a_folder_is_refused(tmp_path):
    line = refusal(folder_of, str(tmp_path), "--source", "v1")
    assert "is a folder, which has no revision 'v1'" in line


def test_a_workdir_is_refused_as_a_source(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "model").touch()
    line = refusal(folder_of, str(tmp_path), "--source")
    assert "is a workdir" in line and line.endswith("takes a workdir")


def test_impossible_file_names_are_refused_in_one_line():
    for name in ("x" * 300, "a\0b"):
        assert "--source" in refusal(folder_of, name, "--source")
        assert "--tokenizer" in refusal(open_tokenizer, name)
