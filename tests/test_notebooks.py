"""The notebooks run from the first cell to the last."""

import pathlib
import runpy

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient (in the extra 'test')")
nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat (in the extra 'test')")

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"
# How many pictures each notebook draws.
PICTURES = {"quickstart": 1, "sampling": 4, "pretrained": 1, "compare": 1}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> pathlib.Path:
    """The workdir of all notebooks: the first trains its model, and others use it."""
    return tmp_path_factory.mktemp("notebooks") / "run"


def test_every_notebook_begins_with_set_up():
    """So that the repository's address is filled in at one place."""
    updated = runpy.run_path(str(NOTEBOOKS / "update.py"))["updated"]
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert [path.stem for path in paths] == sorted(PICTURES)
    for path in paths:
        assert path.read_text(encoding="utf-8") == updated(path), "run notebooks/update.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_every_cell_of_a_notebook_runs(name, workdir, monkeypatch):
    """With `fast = True` in the cell that is tagged `parameters`, and without a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    [parameters] = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    assert "fast = False" in parameters.source
    parameters.source = f'fast = True\nworkdir = "{workdir}"'
    client = nbclient.NotebookClient(
        notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == PICTURES[name]
    printed = "".join(output.get("text", "") for output in outputs)
    assert ("A SMALL MODEL OF ITS OWN" in printed) == (name == "pretrained")
    assert f"jax {__import__('jax').__version__}" in printed
