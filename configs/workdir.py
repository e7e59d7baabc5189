"""The config stored in a workdir: `--config=configs/workdir.py:DIR`. The default of `--workdir` is then DIR."""

import pathlib

from ml_collections import ConfigDict

from calm_jax.cli.files import read_json, refuse_url
from calm_jax.config import as_dict, resolve_stored
from calm_jax.errors import UserError, reason_of


def get_config(folder: str = "") -> ConfigDict:
    if not folder:
        raise UserError("configs/workdir.py needs a workdir: --config=configs/workdir.py:DIR")
    refuse_url(folder, f"--config=configs/workdir.py:{folder}")
    path = pathlib.Path(folder) / "config.json"
    try:
        stored = read_json(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or reason_of(error)
        raise UserError(
            f"{folder} is no workdir: {path} cannot be read ({why}); give the folder of a run"
        ) from error
    return ConfigDict(as_dict(resolve_stored(stored)))
