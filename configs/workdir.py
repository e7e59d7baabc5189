"""The config stored in a workdir: `--config=configs/workdir.py:DIR`. The default of `--workdir` is then DIR."""

import json
import pathlib

from ml_collections import ConfigDict

from calm_jax.config import resolve
from calm_jax.errors import UserError


def get_config(folder: str = "") -> ConfigDict:
    if not folder:
        raise UserError("configs/workdir.py needs a workdir: --config=configs/workdir.py:DIR")
    path = pathlib.Path(folder) / "config.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no workdir: {path} cannot be read ({error})") from error
    resolve(stored)
    return ConfigDict(_with_tuples(stored))


def _with_tuples(tree):
    """Turns the lists of JSON into the tuples that a recipe has."""
    if isinstance(tree, dict):
        return {key: _with_tuples(value) for key, value in tree.items()}
    return tuple(tree) if isinstance(tree, list) else tree
