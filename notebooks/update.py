"""Writes the first cell of every notebook, which is `set_up.py`: `python notebooks/update.py`.

To have notebooks that run on Colab, fill in REPOSITORY in `set_up.py`, and run this.
"""

import json
import pathlib

FOLDER = pathlib.Path(__file__).parent


def updated(path: pathlib.Path) -> str:
    """A notebook's file with `set_up.py` as its first cell of code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cell = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    code = (FOLDER / "set_up.py").read_text(encoding="utf-8").rstrip("\n")
    cell["source"] = code.splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for path in sorted(FOLDER.glob("*.ipynb")):
        path.write_text(updated(path), encoding="utf-8")
