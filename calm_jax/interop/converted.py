"""Writes the workdir of a planned conversion, and prints the plan."""

import dataclasses
import pathlib

import jax
import numpy as np

from calm_jax.cli.files import atomic_folder
from calm_jax.cli.progress import Countdown
from calm_jax.config import as_dict
from calm_jax.interop.conversion import Plan
from calm_jax.interop.pretrained import read_stages
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run.workdir import Workdir
from calm_jax.training.checkpoint import save_params


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


def print_notes(plan: Plan) -> None:
    """Prints the plan's notes, the number of copied tensors, and the names of the tensors that are not used."""
    for note in plan.notes:
        print(f"note: {note}")
    if plan.copies:
        print(f"tensors that are copies of others: {len(plan.copies)}")
    for name in plan.left_over:
        print(f"left over, not used: {name!r}")
