"""The notebooks run from the first cell to the last."""

import pathlib

import pytest

nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient (in the extra 'test')")
nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat (in the extra 'test')")

NOTEBOOKS = pathlib.Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> pathlib.Path:
    """The workdir of both notebooks: the first trains its model, and the second samples from it."""
    return tmp_path_factory.mktemp("notebooks") / "run"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "sampling"])
def test_every_cell_of_a_notebook_runs(name, workdir):
    """With `fast = True` in the cell that is tagged `parameters`."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    [parameters] = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])
    ]
    assert "fast = False" in parameters.source
    parameters.source = f'fast = True\nworkdir = "{workdir}"'
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOKS)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == {"quickstart": 1, "sampling": 4}[name]
    printed = "".join(output.get("text", "") for output in outputs)
    assert f"jax {__import__('jax').__version__}" in printed
