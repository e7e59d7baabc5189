"""Plans evaluation on hardware that this machine lacks: compiles a batch of each evaluation for it, and reads the memory needed."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from calm_jax.build import stage_of
from calm_jax.config import Config
from calm_jax.data.packing import BlockConfig
from calm_jax.data.tokenizers import vocabulary
from calm_jax.evaluation.evaluator import batch_size, jit_sums
from calm_jax.parallel.mesh import BATCH, make_mesh, sharded_shapes
from calm_jax.planning.planner import compile_for
from calm_jax.planning.topology import Topology
from calm_jax.tasks import Task


@dataclasses.dataclass(frozen=True)
class EvaluationPlan:
    """The memory of one batch of an evaluation.

    Attributes:
      name: "autoencoder", "lm" (the protocol of the published scores) or "equal_context".
      rows: blocks of a batch: `eval.batch_size`, rounded up to a multiple of the parts into which the mesh splits rows.
      block_tokens: tokens of a block.
      needed: bytes of one device that the batch needs.
      available: bytes of one device that a program may use.
    """

    name: str
    rows: int
    block_tokens: int
    needed: float
    available: float

    @property
    def fits(self) -> bool:
        return self.needed <= self.available


def plan_evaluations(config: Config, topology: Topology) -> Iterator[EvaluationPlan]:
    """Compiles a batch of each evaluation of a recipe, on the mesh of its training.

    Raises `UserError` if the compiler is not installed, or the mesh does not suit the devices.
    """
    mesh = make_mesh(config.mesh, topology.devices())
    if config.has_autoencoder:
        task, frozen = _task(config, "autoencoder", mesh)
        yield _plan("autoencoder", task, frozen, config.autoencoder.data, config, topology, mesh)
    task, frozen = _task(config, "lm", mesh)
    yield _plan("lm", task, frozen, config.lm.data, config, topology, mesh)
    if config.data.prompt_field:
        return  # records with prompts have no equal-context score
    windows = dataclasses.replace(
        config.lm.data, block_tokens=config.eval.block_tokens, isolate_documents=False
    )
    equal: Any = task
    equal = dataclasses.replace(equal, protocol=config.eval.equal_context)
    yield _plan("equal_context", equal, frozen, windows, config, topology, mesh)


def _task(config: Config, stage: str, mesh: Mesh) -> tuple[Task, Any]:
    """The task of a stage, and the shapes of its frozen parameters."""
    task, frozen_task, _ = stage_of(config, stage, vocabulary(config.tokenizer))
    frozen = {}
    if frozen_task is not None:
        frozen = {"params": jax.eval_shape(frozen_task.init, jax.random.key(0))}
    return task, sharded_shapes(frozen, mesh)


def _plan(
    name: str,
    task: Task,
    frozen: Any,
    data: BlockConfig,
    config: Config,
    topology: Topology,
    mesh: Mesh,
) -> EvaluationPlan:
    rows, layout = batch_size(config.eval, mesh), NamedSharding(mesh, BATCH)
    params = sharded_shapes(jax.eval_shape(task.init, jax.random.key(0)), mesh)
    block = rows, data.block_tokens
    shapes: dict[str, tuple[int, ...]] = {"tokens": block, "targets": block, "index": (rows,)}
    if data.isolate_documents:
        shapes["segments"] = shapes["tokens"]
    batch = {
        key: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout)
        for key, shape in shapes.items()
    }
    sums = jit_sums(name, task, config.eval, mesh)
    made = compile_for(topology, mesh, sums, params=params, frozen=frozen, batch=batch)
    return EvaluationPlan(name, rows, data.block_tokens, made.needed, made.available)
