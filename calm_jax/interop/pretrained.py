"""Published checkpoints as parameters in memory: `load_pretrained`, and `read_stages` for `calm_jax.interop.convert`."""

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from calm_jax.build import make_lm_task
from calm_jax.cli.files import read_json
from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.errors import UserError
from calm_jax.interop import names
from calm_jax.interop.conversion import Part, Plan, check_copies, make_plan
from calm_jax.interop.source import find_tokenizer, folder_of
from calm_jax.parallel.mesh import spec_of
from calm_jax.run.generator import Generator, mesh_here
from calm_jax.tasks import Params
from configs import ar_m, common


def _place(row: names.Row, value: np.ndarray, mesh: Mesh) -> jax.Array:
    """A parameter on the mesh; each device holds its shard."""
    sharding = NamedSharding(mesh, spec_of(row.parameter, value.shape, mesh))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _parameters(part: Part, mesh: Mesh, read: Callable[[int], None]) -> Params:
    """A stage's parameters on the mesh, read one after the other: at most one has a second copy in memory.

    read: called with the number of elements of each array after it is read.
    """
    flat = {}
    for row in part.rows:
        value = names.read_parameter(row, part.weights)
        flat[row.parameter] = _place(row, value, mesh)
        read(value.size)
        del value
    return flax.traverse_util.unflatten_dict(flat, sep="/")


def _check_pad_row(part: Part, params: Mapping[str, Any], pad_id: int) -> None:
    """Raises `UserError` unless the backbone's embedding of the pad token is zero: the model here embeds pads as zero."""
    if params["embed"]["tokens"]["embedding"][pad_id].any():
        raise UserError(
            f"{part.weights.folder}: row {pad_id} of transformer.embed_tokens.weight, the pad token's embedding, is not zero, "
            "as it is in every model of the published code"
        )


def read_stages(
    plan: Plan, mesh: Mesh, read: Callable[[int], None]
) -> Iterator[tuple[str, Params]]:
    """The parameters of each stage of a planned conversion, on the mesh.

    Args:
      plan: the plan that `make_plan` returned.
      mesh: the devices for the parameters.
      read: called with the number of elements of each array after it is read.

    Raises:
      UserError: if weights are damaged.
    """
    check_copies(plan)
    for part in plan.parts:
        params = _parameters(part, mesh, read)
        if part.stage == "lm" and plan.config.has_autoencoder:
            _check_pad_row(part, params, plan.tokenizer.pad_id)
        yield part.stage, params
        del params


def is_published(folder: pathlib.Path) -> bool:
    """Whether a folder is a checkpoint of the published code, whose config.json names an architecture."""
    try:
        return "architectures" in read_json(folder / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def load_pretrained(source: str, tokenizer: str = "", revision: str = "") -> Generator:
    """Loads a published language model onto all available devices, ready to continue prompts. Writes no files.

    Args:
      source: a folder of a published checkpoint, or `owner/name` on the Hugging Face hub.
      tokenizer: the tokenizer's file, a workdir, or "bytes"; if empty, the tokenizer in the source's folder.
      revision: a branch, a tag or a commit of the repository; its main branch if empty.

    Raises:
      UserError: for the first thing that is missing, damaged, unsupported or inconsistent.
    """
    # A wrong file is refused before the weights are downloaded.
    given = open_tokenizer(tokenizer) if tokenizer else None
    folder = folder_of(source, "source", revision)
    plan = make_plan(
        folder,
        None,
        *(given or find_tokenizer(folder)),
        {True: common.get_config(), False: ar_m.get_config()},
        {},
    )
    if all(part.stage != "lm" for part in plan.parts):
        raise UserError(f"source={source!r} is an autoencoder: give a language model")
    config = plan.config
    mesh = mesh_here(config, plan.tokenizer.vocab_size)
    with jax.set_mesh(mesh):
        params = dict(read_stages(plan, mesh, lambda size: None))
        task = make_lm_task(config, plan.tokenizer)
    frozen = {"params": params["autoencoder"]} if config.has_autoencoder else {}
    return Generator(task, params["lm"], frozen, plan.tokenizer, config)
