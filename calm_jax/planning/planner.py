"""Plans training on hardware that this machine lacks, by compiling a recipe's training step for it ahead of time."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from calm_jax.build import check_attention, stage_of
from calm_jax.config import Config
from calm_jax.cost import flops, sizes
from calm_jax.data.tokenizers import Vocabulary, vocabulary
from calm_jax.errors import UserError
from calm_jax.parallel.mesh import MeshConfig, make_mesh, with_layout
from calm_jax.planning import fitting, hlo, memory_traffic
from calm_jax.planning.result import Plan, Traffic
from calm_jax.planning.topology import Topology
from calm_jax.training.step import check_batches, step_program


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A training step that can be compiled, and the memory of its arguments.

    Attributes:
      config: the recipe, with the mesh to plan for.
      stage: "autoencoder" or "lm".
      topology: the hardware.
      mesh: the mesh, of stand-ins for the hardware's devices.
      vocabulary: the vocabulary of the recipe's tokenizer.
      arguments: bytes of the step's arguments on one device, by kind.
      lower: traces and lowers the step; returns a `jax.stages.Lowered`.
    """

    config: Config
    stage: str
    topology: Topology
    mesh: Mesh
    vocabulary: Vocabulary
    arguments: dict[str, float]
    lower: Callable[[], Any]


def _check_has_stage(config: Config, stage: str) -> None:
    if stage == "autoencoder" and not config.has_autoencoder:
        raise UserError("--stage=autoencoder: lm.head.name='softmax' has no autoencoder")


def check_stage(config: Config, stage: str, mesh: Mesh) -> None:
    """Raises `UserError` if the recipe lacks the stage, or the mesh does not suit its batch or its attention."""
    _check_has_stage(config, stage)
    check_batches(stage, getattr(config, stage).training, mesh)
    if stage == "lm":
        with jax.set_mesh(mesh):
            check_attention(config)


def prepare(config: Config, stage: str, topology: Topology) -> Lowered:
    """The training step of `stage` for `topology`, with the config's mesh over its devices.

    Raises:
      UserError: if the compiler is not installed, or the mesh does not suit the devices, the batch or the attention.
    """
    section = getattr(config, stage)
    words = vocabulary(config.tokenizer)
    mesh = make_mesh(config.mesh, topology.devices())
    check_stage(config, stage, mesh)
    task, frozen_task, optimizer = stage_of(config, stage, words)
    # The key is made before the mesh is set, because nothing can run on its devices.
    key = jax.random.key(config.seed)
    frozen = {} if frozen_task is None else {"params": jax.eval_shape(frozen_task.init, key)}
    with jax.set_mesh(mesh), topology.answering():
        program = step_program(
            task, optimizer, section.training, section.data, frozen, key, words.pad_id, mesh
        )
    state, frozen, batch = program.arguments
    arguments = {
        "parameters": fitting.bytes_of(state.params),
        "optimizer": fitting.bytes_of(state.opt_state),
        "frozen": fitting.bytes_of(frozen),
        "batch": fitting.bytes_of(batch),
    }

    def lower() -> Any:
        with jax.set_mesh(mesh), topology.answering():
            return program.step.lower(*program.arguments)

    return Lowered(config, stage, topology, mesh, words, arguments, lower)


# XLA's options by platform. Without a GPU, kernels cannot be autotuned, and some that only autotuning selects do not
# compile.
COMPILER_OPTIONS = {"cuda": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}}


class ForHardware(NamedTuple):
    """A program that was compiled for other hardware.

    Attributes:
      program: None if the compiler refused it, because it does not fit.
      results: the shapes of its results with their layout; None if it was refused.
      needed: bytes of one device that it needs; more than `available` if it was refused.
      available: bytes of one device that a program may use: the hardware's, or what the compiler said when it refused.
    """

    program: jax.stages.Compiled | None
    results: Any
    needed: float
    available: float


def compile_for(
    topology: Topology,
    mesh: Mesh,
    function: Any,
    options: Mapping[str, dict[str, Any]] = COMPILER_OPTIONS,
    **arguments: Any,
) -> ForHardware:
    """Compiles a jitted function; `arguments` are the function's own, arrays of them as shapes with shardings."""
    with jax.set_mesh(mesh), topology.answering():
        lowered = function.lower(**arguments)
    leaves = jax.tree.leaves(arguments)
    held = fitting.bytes_of([one for one in leaves if isinstance(one, jax.ShapeDtypeStruct)])
    option = options.get(topology.platform)
    program, memory, available = fitting.compile_program(lowered, held, option)
    needed = held + sum(memory.values())
    if program is None:
        return ForHardware(None, None, needed, available)
    results = with_layout(lowered.out_info, program.output_shardings)
    return ForHardware(program, results, needed, topology.memory)


def compile_plan(lowered: Lowered) -> Plan:
    """Compiles a step, which takes from twenty seconds to some minutes, and makes a plan from the compiled program."""
    config, stage, topology = lowered.config, lowered.stage, lowered.topology
    section, vocab_size = getattr(config, stage), lowered.vocabulary.vocab_size
    accelerator, num_devices = topology.accelerator, topology.num_devices
    tokens = section.training.batch_size * section.data.block_tokens
    options = COMPILER_OPTIONS.get(topology.platform)
    xla_flops, moved = math.nan, math.nan
    collectives: dict[str, Traffic] = {}
    unknown: tuple[str, ...] = ()
    arguments = sum(lowered.arguments.values())
    program, rest, available = fitting.compile_program(lowered.lower(), arguments, options)
    memory = lowered.arguments | rest
    if program is not None:
        available = topology.memory
        # Not every compiler has a cost analysis.
        xla_flops = float((program.cost_analysis() or {"flops": math.nan})["flops"])
        read = hlo.Program.of_compiled(program)
        unknown = read.runs()[1]
        moved = memory_traffic.bytes_moved(read)
        for one in read.collectives(num_devices):
            before = collectives.get(one.kind, Traffic(0, 0.0))
            collectives[one.kind] = Traffic(before.count + one.times, before.bytes + one.moved)
    mesh = dict(lowered.mesh.shape)
    ideal = sizes.fsdp_traffic(
        config,
        stage,
        vocab_size,
        section.training.accumulation_steps,
        mesh["data"],
        mesh["fsdp"],
    )
    per_token = flops.training(config, stage, vocab_size)
    return Plan(
        topology=str(topology),
        mesh=mesh,
        stage=stage,
        parameters=sizes.trained(config, stage, vocab_size),
        frozen=sizes.frozen(config, stage, vocab_size),
        state_bytes=sizes.state_bytes(config, stage, vocab_size),
        chosen=fitting.chosen(config, stage),
        tokens=tokens,
        flops=per_token * tokens,
        recomputed=flops.recomputed(config, stage, vocab_size, mesh["data"] * mesh["fsdp"])
        * tokens,
        xla_flops=xla_flops,
        memory=memory,
        needed=sum(memory.values()),
        available=available,
        memory_traffic=moved,
        collectives=collectives,
        ideal_traffic=ideal,
        unknown_loops=unknown,
        num_steps=section.training.num_steps,
        accelerator=accelerator,
        num_devices=num_devices,
    )


def plan_for(
    config: Config, stage: str, topology: Topology, compile_step: Callable[[Lowered], Plan]
) -> Plan:
    """The plan of a stage on `topology`, with automatic keys chosen as training would (`calm_jax.planning.fitting`).

    Args:
      config: the recipe, with the mesh to plan for.
      stage: "autoencoder" or "lm".
      topology: the hardware.
      compile_step: `compile_plan`, or a function around it.

    Raises:
      UserError: as `prepare` does.
    """
    if not fitting.is_automatic(config, stage):
        return compile_step(prepare(config, stage, topology))
    plans: dict[Config, Plan] = {}

    def measure(one: Config) -> fitting.Need:
        lowered = prepare(one, stage, topology)
        plans[one] = compile_step(lowered)
        arguments = sum(lowered.arguments.values())
        return fitting.Need(arguments, plans[one].needed - arguments, plans[one].seconds(1.0))

    mesh = make_mesh(config.mesh, topology.devices())
    check_stage(config, stage, mesh)
    vocab_size = vocabulary(config.tokenizer).vocab_size
    every = fitting.candidates(config, stage, mesh, vocab_size, topology.accelerator)
    found = fitting.fit_to_memory(every, stage, fitting.SHARE * topology.memory, measure)
    # Training chooses among the same candidates, and allows a step at most this share of the memory.
    return dataclasses.replace(plans[found.config], available=fitting.SHARE * topology.memory)


@dataclasses.dataclass(frozen=True)
class Try:
    """One size of hardware that `fit` tried.

    Attributes:
      topology: the hardware.
      plan: None if the step was not compiled.
      why_not: why the step cannot run on this size; empty if it can.
    """

    topology: Topology
    plan: Plan | None
    why_not: str


def fit(
    config: Config,
    stage: str,
    sizes_of_family: list[Topology],
    compile_step: Callable[[Lowered], Plan],
    note: Callable[[str], None],
) -> list[Try]:
    """Tries sizes of hardware in turn, up to the first into which the training step fits.

    The mesh is the config's `tensor`, with `fsdp` over all other devices. A size is not compiled for if its number of
    devices does not divide the batch, or if the step's arguments alone exceed its memory.

    Args:
      config: the recipe.
      stage: "autoencoder" or "lm".
      sizes_of_family: the hardware to try, ascending.
      compile_step: `compile_plan`, or a function around it.
      note: gets a line about each size.

    Returns:
      The sizes that were tried; the last one fits if its `why_not` is empty.

    Raises:
      UserError: for faults of the recipe that no other size would cure: it lacks the stage, or its tokenizer cannot be read.
    """
    _check_has_stage(config, stage)
    vocabulary(config.tokenizer)
    tries: list[Try] = []

    def compile_unless_too_large(lowered: Lowered) -> Plan:
        least, has = sum(lowered.arguments.values()), lowered.topology.memory
        if least > has:
            raise UserError(
                f"{least / 2**30:.1f} GiB of parameters and state, of {has / 2**30:.1f} GiB"
            )
        return compile_step(lowered)

    for topology in sizes_of_family:
        mesh = MeshConfig(data=1, fsdp=-1, tensor=max(1, config.mesh.tensor))
        one = dataclasses.replace(config, mesh=mesh)
        try:
            plan = plan_for(one, stage, topology, compile_unless_too_large)
            tries.append(Try(topology, plan, "" if plan.fits else _shortage(plan)))
        except UserError as error:
            tries.append(Try(topology, None, str(error)))
        note(f"{topology}: {tries[-1].why_not or 'fits'}")
        if not tries[-1].why_not:
            break
    return tries


def _shortage(plan: Plan) -> str:
    return f"needs {plan.needed / 2**30:.1f} GiB of {plan.available / 2**30:.1f} GiB"
