"""Converts a published PyTorch checkpoint to a workdir, without PyTorch.

    python -m calm_jax.interop.convert --source=SRC --workdir=DIR [--autoencoder=SRC] [--tokenizer=FILE] [--dry_run]
        [--config.KEY=VALUE ...]

SRC is a folder with config.json and weights, or the name of a repository on the Hugging Face hub (of which --revision
names a branch, a tag or a commit). The workdir can be
evaluated, generated from and trained further; its recipe is the published recipe with the checkpoint's model and the
given keys. DIR gets its name only when it is complete.
"""

import dataclasses
import pathlib
import time

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from calm_jax.cli.command import command
from calm_jax.cli.files import atomic_folder, local_path, refuse_existing
from calm_jax.cli.flags import parse_config_flags
from calm_jax.cli.progress import Countdown
from calm_jax.config import as_dict
from calm_jax.errors import UserError
from calm_jax.interop.conversion import Plan, make_plan
from calm_jax.interop.pretrained import read_stages
from calm_jax.interop.source import find_tokenizer, folder_of
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run.workdir import Workdir
from calm_jax.training.checkpoint import save_params
from configs import ar_m, common

_SOURCE = flags.DEFINE_string(
    "source", "", "folder of a published checkpoint, or owner/name on the hub"
)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder to make")
_AUTOENCODER = flags.DEFINE_string(
    "autoencoder",
    "",
    "the autoencoder's checkpoint, as --source, for a language model that does not include it",
)
_REVISION = flags.DEFINE_string(
    "revision", "", "branch, tag or commit of a --source on the hub; if empty, its main branch"
)
_AUTOENCODER_REVISION = flags.DEFINE_string(
    "autoencoder_revision", "", "the same of an --autoencoder on the hub"
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "tokenizer file, or bytes; by default the tokenizer in the source's folder"
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "print which tensor becomes which parameter, and write nothing"
)


def convert(plan: Plan, path: pathlib.Path) -> None:
    """Writes the workdir of a plan.

    Raises:
      UserError: if weights are damaged or `path` cannot be written; nothing is left at `path` then.
    """
    mesh = make_mesh(plan.config.mesh)
    # The conversion's mesh is not stored in the workdir, which may be used on other devices.
    config = dataclasses.replace(plan.config, mesh=MeshConfig(data=-1, fsdp=1, tensor=1))
    about = {"config": as_dict(config), "tokenizer": plan.tokenizer.fingerprint}
    with (
        atomic_folder(path, "--workdir") as unfinished,
        jax.set_mesh(mesh),
        Countdown("converting", plan.num_parameters, "parameters") as countdown,
    ):
        workdir = Workdir(unfinished)
        for stage, params in read_stages(plan, mesh, countdown.add):
            save_params(workdir.checkpoints(stage), params, about)
            del params
        origin = {"architecture": plan.architecture, "left_over": plan.left_over}
        workdir.create_converted(config, plan.tokenizer, origin)


def print_plan(plan: Plan) -> None:
    """Prints the table of parameters and the published tensors that they are made of."""
    table = [("parameter", "published tensor", "shape", "from", "MiB")]
    for part in plan.parts:
        for row in part.rows:
            shape = part.shape(row)
            size = 4 * int(np.prod(shape))
            dtypes = {str(part.weights.tensors[name].dtype) for name in row.published_names()}
            table.append(
                (
                    f"{part.stage}/{row.parameter}",
                    row.published,
                    " x ".join(map(str, shape)),
                    ", ".join(sorted(dtypes)),
                    f"{size / 2**20:,.2f}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        # Not rich's table, which fits the terminal's width and would cut names.
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(line.rstrip())
    size = 4 * plan.num_parameters
    print(f"{plan.num_parameters:,} parameters, {size / 2**20:,.1f} MiB as float32")


def _print_notes(plan: Plan) -> None:
    for note in plan.notes:
        print(f"note: {note}")
    if plan.copies:
        print(f"tensors that are copies of others: {len(plan.copies)}")
    for name in plan.left_over:
        print(f"left over, not used: {name!r}")


@command
def main(argv: list[str]) -> None:
    if not _SOURCE.value:
        raise UserError("give a published checkpoint: --source=FOLDER or --source=owner/name")
    if not _WORKDIR.value and not _DRY_RUN.value:
        raise UserError("give the folder to make: --workdir=DIR")
    path, began = local_path(_WORKDIR.value, "--workdir"), time.monotonic()
    if _WORKDIR.value:
        refuse_existing(path)
    if _AUTOENCODER_REVISION.value and not _AUTOENCODER.value:
        raise UserError("--autoencoder_revision needs --autoencoder=owner/name")
    folder = folder_of(_SOURCE.value, "--source", _REVISION.value)
    autoencoder = (
        folder_of(_AUTOENCODER.value, "--autoencoder", _AUTOENCODER_REVISION.value)
        if _AUTOENCODER.value
        else None
    )
    tokenizer, tokenizer_config = find_tokenizer(_TOKENIZER.value, folder)
    plan = make_plan(
        folder,
        autoencoder,
        tokenizer,
        tokenizer_config,
        {True: common.get_config(), False: ar_m.get_config()},
        config_flags.get_override_values(flags.FLAGS["config"]),
    )
    if _DRY_RUN.value:
        print_plan(plan)
        _print_notes(plan)
        return
    convert(plan, path)
    _print_notes(plan)
    seconds = time.monotonic() - began
    print(f"{path} is ready: {plan.num_parameters:,} parameters in {seconds:.1f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_config_flags(common.get_config()))
