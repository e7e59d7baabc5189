"""What a recipe would need and take on hardware that is not here: its training step, compiled ahead of time."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding

from calm_jax import compiled, flops, sizes
from calm_jax.accelerators import Accelerator
from calm_jax.beginning import check_attention
from calm_jax.config import Config
from calm_jax.data.tokenizers import Vocabulary, vocabulary
from calm_jax.errors import UserError
from calm_jax.mesh import BATCH, MeshConfig, make_mesh, shardings
from calm_jax.optim import make_optimizer
from calm_jax.step import batch_shapes, check_batches, fresh_state, jit_step, make_step
from calm_jax.tasks import Task
from calm_jax.topology import Topology
from calm_jax.workdir import make_autoencoder_task, make_lm_task


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in a step: how many, and bytes that each device receives (see `Collective.moved`)."""

    count: int
    bytes: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything is of one step; bytes are of one device unless they say otherwise.

    memory: by kind. needed: their sum, which is known also for a program that does not fit. collectives: by kind; empty
    for one that does not fit. ideal_traffic: bytes that a device receives when training is fully sharded and nothing
    moves but parameters and gradients. xla_flops: as XLA counts, each loop's body once. unknown_loops: counted once for
    the collectives, too.
    """

    topology: str
    mesh: dict[str, int]
    stage: str
    parameters: dict[str, int]
    frozen: dict[str, int]
    state_bytes: dict[str, int]
    tokens: int
    flops: float
    recomputed: float
    xla_flops: float
    memory: dict[str, float]
    needed: float
    available: float
    collectives: dict[str, Traffic]
    ideal_traffic: float
    unknown_loops: tuple[str, ...]
    num_steps: int
    accelerator: Accelerator
    num_devices: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def traffic(self) -> float:
        """Bytes that a device receives."""
        return sum(kind.bytes for kind in self.collectives.values())

    def seconds(self, efficiency: float) -> float:
        """The longer of computing and exchanging, which go on at the same time, at this share of the hardware's peaks."""
        computing = (self.flops + self.recomputed) / (self.num_devices * self.accelerator.flops)
        return max(computing, self.traffic / self.accelerator.interconnect) / efficiency

    def hours(self, efficiency: float) -> float:
        """Of all steps."""
        return self.num_steps * self.seconds(efficiency) / 3600

    def utilisation(self, efficiency: float) -> float:
        """Model FLOPs utilisation; with efficiency 1 no program like this one can have more."""
        peak = self.num_devices * self.accelerator.flops
        return self.flops / (self.seconds(efficiency) * peak)


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A step before it is compiled, with what is known of it on paper.

    arguments: bytes of one device by kind.
    """

    config: Config
    stage: str
    topology: Topology
    mesh: Mesh
    vocabulary: Vocabulary
    arguments: dict[str, float]
    lower: Callable[[], Any]


def _placed(tree: Any, layout: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, layout
    )


def _bytes(tree: Any) -> float:
    """Of one device."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def check_stage(config: Config, stage: str, mesh: Mesh) -> None:
    """Raises `UserError` for a stage that the recipe has not, or that the mesh cannot train."""
    if stage == "autoencoder" and not config.has_autoencoder:
        raise UserError("--stage=autoencoder: lm.head.name='softmax' has no autoencoder")
    check_batches(stage, getattr(config, stage).training, mesh)
    if stage == "lm":
        with jax.set_mesh(mesh):
            check_attention(config)


def stage_of(
    config: Config, stage: str, words: Vocabulary
) -> tuple[Task, Task | None, optax.GradientTransformation]:
    """What a stage trains, whose parameters are frozen in it (None for nothing), and its optimizer."""
    section = getattr(config, stage)
    optimizer = make_optimizer(section.optimizer, section.training.num_steps)
    autoencoder = make_autoencoder_task(config, words) if config.has_autoencoder else None
    if autoencoder is not None and stage == "autoencoder":
        return autoencoder, None, optimizer
    return make_lm_task(config, words, config.eval.published), autoencoder, optimizer


def prepare(config: Config, stage: str, topology: Topology) -> Lowered:
    """The step that training takes, with everything in its place. Raises `UserError` for a mesh or batch that does not fit."""
    section = getattr(config, stage)
    words = vocabulary(config.tokenizer)
    mesh = make_mesh(config.mesh, topology.devices())
    check_stage(config, stage, mesh)
    task, source, optimizer = stage_of(config, stage, words)
    # Made outside of the mesh, on which nothing can run.
    key = jax.random.key(config.seed)
    frozen = {} if source is None else {"params": jax.eval_shape(source.init, key)}
    batch = batch_shapes(section.training, section.data.block_tokens)
    with jax.set_mesh(mesh), topology.answering():
        state = jax.eval_shape(fresh_state(task, optimizer, frozen, batch, key))
        state = _placed(state, shardings(state, mesh))
        frozen = _placed(frozen, shardings(frozen, mesh))
        batch = _placed(batch, {name: NamedSharding(mesh, BATCH) for name in batch})
    arguments = {
        "parameters": _bytes(state.params),
        "optimizer": _bytes(state.opt_state),
        "frozen": _bytes(frozen),
        "batch": _bytes(batch),
    }

    def lower() -> Any:
        step = make_step(task, optimizer, section.training, key, words.pad_id)
        with jax.set_mesh(mesh), topology.answering():
            return jit_step(step, state, mesh).lower(state, frozen, batch)

    return Lowered(config, stage, topology, mesh, words, arguments, lower)


# What XLA is told besides: no GPU is here to try kernels on, and of those that are only chosen by trying some do not compile.
_OPTIONS = {"cuda": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}}
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
# TPU compilers refuse what does not fit, and say how much it is.
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = (
    # Everything, as used and available.
    (re.compile(rf"Used {_SIZE}i?B? of {_SIZE}i?B? hbm"), True),
    # Temporaries alone, and available.
    (re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"), False),
)


def too_large(message: str) -> tuple[float, float, bool] | None:
    """The bytes that a compiler's refusal says are needed, and available, and whether the first are of everything or of
    temporaries alone; None for another error."""
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern, is_whole in _TOO_LARGE:
        found = pattern.search(message)
        if found:
            needed, unit, available, available_unit = found.groups()
            sizes_of = float(needed) * _UNITS[unit], float(available) * _UNITS[available_unit]
            return *sizes_of, is_whole
    return None


def recomputed_flops(config: Config, stage: str, vocab_size: int) -> float:
    """Per token, what the backward pass computes once more; the forward pass is a third of training."""
    if stage == "autoencoder":
        return 0.0
    parts = flops.lm_training(config, vocab_size, flops.Count.OURS)
    again = parts["backbone"] if config.lm.model.remat == "full" else 0.0
    # The softmax head computes its logits again whatever the layers do.
    return (again + parts.get("vocabulary", 0.0)) / 3


def compile_plan(lowered: Lowered) -> Plan:
    """Compiles, which takes from twenty seconds to some minutes."""
    config, stage, topology = lowered.config, lowered.stage, lowered.topology
    section, vocab_size = getattr(config, stage), lowered.vocabulary.vocab_size
    accelerator, num_devices = topology.accelerator, topology.num_devices
    tokens = section.training.batch_size * section.data.block_tokens
    options = _OPTIONS.get(topology.platform)
    xla_flops, collectives, unknown = math.nan, {}, ()
    memory, available = dict(lowered.arguments), topology.memory
    try:
        program = lowered.lower().compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        found = too_large(str(error))
        if found is None:
            raise
        needed, available, is_whole = found
        known = sum(memory.values()) if is_whole else 0.0
        memory["temporaries"] = max(0.0, needed - known)
    else:
        stats = program.memory_analysis()
        memory["temporaries"] = float(stats.temp_size_in_bytes)
        memory["outputs, not in place"] = float(
            stats.output_size_in_bytes - stats.alias_size_in_bytes
        )
        memory["program"] = float(stats.generated_code_size_in_bytes)
        # Not every compiler counts.
        xla_flops = float((program.cost_analysis() or {"flops": math.nan})["flops"])
        read = compiled.Program.of(program.as_text())
        unknown = read.runs()[1]
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
        tokens=tokens,
        flops=per_token * tokens,
        recomputed=recomputed_flops(config, stage, vocab_size) * tokens,
        xla_flops=xla_flops,
        memory=memory,
        needed=sum(memory.values()),
        available=available,
        collectives=collectives,
        ideal_traffic=ideal,
        unknown_loops=unknown,
        num_steps=section.training.num_steps,
        accelerator=accelerator,
        num_devices=num_devices,
    )


@dataclasses.dataclass(frozen=True)
class Try:
    """A size that was tried: its plan, or in a word why there is none."""

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
    """Tries sizes from small to large, and ends with the first that fits, if there is one.

    The mesh is fsdp alone, over all devices, but for what the config wants for `tensor`. A size whose devices do not divide
    the batch is left out, and so is one for which parameters, optimizer, frozen parameters and batch, which are known
    without compiling, already are more than it has.
    """
    tries = []
    for topology in sizes_of_family:
        tensor = max(1, config.mesh.tensor)
        mesh = MeshConfig(data=1, fsdp=-1, tensor=tensor)
        one = dataclasses.replace(config, mesh=mesh)
        try:
            lowered = prepare(one, stage, topology)
        except UserError as error:
            tries.append(Try(topology, None, str(error)))
        else:
            least, has = sum(lowered.arguments.values()), topology.memory
            if least > has:
                why = f"{least / 2**30:.1f} GiB of parameters and state, of {has / 2**30:.1f} GiB"
                tries.append(Try(topology, None, why))
            else:
                plan = compile_step(lowered)
                why = "" if plan.fits else _shortage(plan)
                tries.append(Try(topology, plan, why))
        note(f"{topology}: {tries[-1].why_not or 'fits'}")
        if not tries[-1].why_not:
            break
    return tries


def _shortage(plan: Plan) -> str:
    return f"needs {plan.needed / 2**30:.1f} GiB of {plan.available / 2**30:.1f} GiB"


def advice(config: Config, stage: str, plan: Plan) -> list[str]:
    """What to change so that a plan fits that does not, the cheapest first."""
    section = getattr(config, stage)
    rows = section.training.batch_size // section.training.accumulation_steps
    ways = plan.mesh["data"] * plan.mesh["fsdp"]
    ideas = []
    state = sum(plan.memory[kind] for kind in ("parameters", "optimizer", "frozen"))
    if state > plan.available / 2:
        ideas.append(
            f"parameters and optimizer take {state / 2**30:.1f} GiB: more devices along mesh.fsdp (now "
            f"{plan.mesh['fsdp']}) or mesh.tensor (now {plan.mesh['tensor']})"
        )
    if rows > ways:
        most = section.training.batch_size // ways
        ideas.append(
            f"--config.{stage}.training.accumulation_steps={min(most, 2 * section.training.accumulation_steps)} or more, up to "
            f"{most} here (now {section.training.accumulation_steps}): temporaries shrink with it, traffic grows"
        )
    if stage == "lm" and config.lm.model.remat != "full":
        ideas.append("--config.lm.model.remat=full: layers are computed again instead of kept")
    if stage == "lm" and config.lm.model.attention == "xla":
        positions = section.data.block_tokens // config.chunk_size
        scores = 4.0 * rows / ways * config.lm.model.num_heads * positions**2
        if scores > plan.available / 10:
            ideas.append(
                f"--config.lm.model.attention=auto: xla's scores take {scores / 2**30:.1f} GiB of a layer, which kernels do not keep"
            )
    if not ideas:
        ideas.append("more or larger devices: batch and layers are split as far as they go")
    return ideas
