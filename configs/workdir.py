"""The config stored in a workdir: `--config=configs/workdir.py:DIR`. The default of `--workdir` is then DIR."""

import pathlib

from ml_collections import ConfigDict

from calm_jax.cli.files import refuse_url
from calm_jax.config import as_dict
from calm_jax.errors import UserError
from calm_jax.run.workdir import Workdir


def get_config(folder: str = "") -> ConfigDict:
    if not folder:
        raise UserError("configs/workdir.py needs a workdir: --config=configs/workdir.py:DIR")
    refuse_url(folder, f"--config=configs/workdir.py:{folder}")
    return ConfigDict(as_dict(Workdir(pathlib.Path(folder)).config))
