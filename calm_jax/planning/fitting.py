"""Chooses the automatic keys of a recipe so that a training step fits into memory, and chooses the mesh of generation.

The automatic keys are `training.accumulation_steps=0` and `lm.model.remat="auto"`. Candidates for their values are compiled, and
the compiled program says how much memory a step needs. For each value of `remat`, candidates are compiled one after the other,
the fastest by FLOPs and exchanged bytes first, until one fits. Among those that fit, the fastest is taken, where the memory
traffic of the compiled programs counts, too. For devices whose rates are not known, the first that fits is taken.
"""

import dataclasses
import itertools
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from calm_jax.build import stage_of
from calm_jax.config import Config
from calm_jax.cost import flops, sizes
from calm_jax.data.tokenizers import Tokenizer, Vocabulary
from calm_jax.errors import UserError, typed_reason_of
from calm_jax.parallel import multihost
from calm_jax.parallel.devices import Accelerator, accelerator, memory_here
from calm_jax.parallel.mesh import MeshConfig, adapted, num_row_shards
from calm_jax.planning import hlo, memory_traffic
from calm_jax.planning.result import limits
from calm_jax.tasks import Params
from calm_jax.training.step import step_program

# The share of an accelerator's memory that a step may take. The rest is for the programs that score and save, and for
# fragmentation.
SHARE = 0.9
# The same for a CPU, whose memory also holds the text, a copy of the state while it is saved, and other programs.
_SHARE_OF_HOST = 0.5
# The share of a device's memory that parameters in float32 and their copy in the compute dtype may take together if each device is
# to hold all of them for generation. The rest is for keys, values and samples.
_SHARE_OF_REPLICAS = 0.75


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "": 1}
# The TPU compiler's error for a program that does not fit states the bytes that it needs.
_SIZE = r"([\d.]+)([KMGT]?)"
_TOO_LARGE = (
    # Bytes needed by the whole program, and available.
    (re.compile(rf"Used {_SIZE}i?B? of {_SIZE}i?B? hbm"), True),
    # Bytes needed by the temporaries alone, and available.
    (re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"), False),
)


def too_large(message: str) -> tuple[float, float, bool] | None:
    """Reads the compiler's error for a program that does not fit into memory.

    Returns:
      The bytes needed, the bytes available, and whether the first are those of the whole program (True) or of the
      temporaries alone (False); None for another error.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    for pattern, is_whole in _TOO_LARGE:
        found = pattern.search(message)
        if found:
            needed, unit, available, available_unit = found.groups()
            sizes_of = float(needed) * _UNITS[unit], float(available) * _UNITS[available_unit]
            return *sizes_of, is_whole
    return None


def bytes_of(tree: Any) -> float:
    """Bytes on one device of a tree of shapes with shardings."""
    return float(
        sum(
            math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf in jax.tree.leaves(tree)
        )
    )


def generation_mesh(
    config: Config, vocab_size: int, devices: Sequence[jax.Device], memory: float
) -> MeshConfig:
    """The mesh on which generation runs, which need not be that of training.

    Every chunk needs all parameters. If each device holds all of them, the devices only split the rows of a batch. If the
    parameters are sharded, each device receives the other shards for every chunk.

    Args:
      config: the model's recipe; `config.mesh` is the mesh of its training.
      vocab_size: number of ids of its tokenizer.
      devices: the devices to generate on.
      memory: bytes of one device's memory.

    Returns:
      All devices along `data`, if the parameters and their copy in the compute dtype take at most three quarters of a device's
      memory. Otherwise `config.mesh`, adapted to the devices.
    """
    # A single device holds all parameters in any case, so their counting, which takes half a second, is saved.
    if len(devices) > 1:
        held = sizes.state_bytes(config, "lm", vocab_size)
        copied = np.dtype(config.compute_dtype).itemsize / np.dtype(np.float32).itemsize
        needed = (1 + copied) * held["parameters"] + 2 * held["frozen"]
        if needed <= _SHARE_OF_REPLICAS * memory:
            return MeshConfig(data=-1, fsdp=1, tensor=1)
    return adapted(config.mesh, devices)


class Need(NamedTuple):
    """What a step needs.

    Attributes:
      arguments: bytes of one device for its arguments, which are equal for all candidates.
      rest: bytes of one device for everything else.
      seconds: the least time that it takes (`least_seconds`); NaN if unknown.
    """

    arguments: float
    rest: float
    seconds: float

    @property
    def total(self) -> float:
        return self.arguments + self.rest


class Compiled(NamedTuple):
    """A compiled program.

    Attributes:
      program: None if the compiler refused it because it does not fit into memory, as that of TPUs does.
      memory: bytes of one device besides the program's arguments, by kind; with the arguments more than `available` if it was
        refused.
      available: bytes that the compiler said a device has, when it refused the program; NaN otherwise.
    """

    program: jax.stages.Compiled | None
    memory: dict[str, float]
    available: float


def compile_program(
    lowered: jax.stages.Lowered, arguments: float, options: dict[str, Any] | None = None
) -> Compiled:
    """Compiles a program and reads the memory that it needs, also from the error of a compiler that refuses it.

    Args:
      lowered: the program.
      arguments: bytes of its arguments on one device (`bytes_of`).
      options: the compiler's options.
    """
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        found = too_large(str(error))
        if found is None:
            raise
        needed, available, is_whole = found
        # The message rounds both numbers, which may be equal then: at least a byte more is needed than there is.
        temporaries = needed - (arguments if is_whole else 0.0)
        temporaries = max(0.0, temporaries, available + 1 - arguments)
        return Compiled(None, {"temporaries": temporaries}, available)
    stats: Any = program.memory_analysis()
    memory = {
        "temporaries": float(stats.temp_size_in_bytes),
        "outputs, not in place": float(stats.output_size_in_bytes - stats.alias_size_in_bytes),
        "program": float(stats.generated_code_size_in_bytes),
    }
    return Compiled(program, memory, math.nan)


def chosen(config: Config, stage: str) -> dict[str, Any]:
    """The values of a stage's keys that can be chosen automatically, by the keys' full names."""
    steps = getattr(config, stage).training.accumulation_steps
    values = {f"{stage}.training.accumulation_steps": steps}
    return values | ({"lm.model.remat": config.lm.model.remat} if stage == "lm" else {})


def is_automatic(config: Config, stage: str) -> bool:
    """Whether a key of the stage is to be chosen automatically."""
    return any(value in (0, "auto") for value in chosen(config, stage).values())


def asked(config: Config, stage: str) -> dict[str, Any]:
    """The automatic keys as the recipe gives them, and the attention kernel: a stored choice is taken again only if these are the same."""
    return {"asked": chosen(config, stage), "attention": config.lm.model.attention}


def with_choice(config: Config, values: Mapping[str, Any]) -> Config:
    """The config with other `values` of some keys, which are given by their full names."""

    def replaced(section: Any, path: str, value: Any) -> Any:
        name, _, rest = path.partition(".")
        new = replaced(getattr(section, name), rest, value) if rest else value
        return dataclasses.replace(section, **{name: new})

    for path, value in values.items():
        config = replaced(config, path, value)
    return config


def candidates(
    config: Config, stage: str, mesh: Mesh, vocab_size: int, rates: Accelerator | None
) -> list[Config]:
    """The configs that the automatic keys allow, from the fastest on by their FLOPs and the bytes that devices exchange.

    If `rates` is None, configs come first that recompute nothing, or nothing that is counted, and then those with fewer
    microbatches.
    """
    training = getattr(config, stage).training
    shards = num_row_shards(mesh)
    numbers = [
        number
        for number in range(1, training.batch_size // shards + 1)
        if training.batch_size % (number * shards) == 0
    ]
    # On CPUs, computing norms and activations again takes no longer than storing and reading them (docs/benchmarks.md).
    device = mesh.abstract_mesh.abstract_device
    least = "dots" if device is not None and device.platform == "cpu" else "none"
    # The values of a key that ask for an automatic choice, and the values to choose from.
    automatic: dict[Any, Sequence[Any]] = {0: numbers, "auto": (least, "full")}
    given = chosen(config, stage)
    values = itertools.product(*(automatic.get(value, [value]) for value in given.values()))
    tokens = training.batch_size * getattr(config, stage).data.block_tokens

    def traffic(number: int) -> float:
        axes = mesh.shape["data"], mesh.shape["fsdp"]
        return sizes.fsdp_traffic(config, stage, vocab_size, number, *axes)

    # Bytes that each device receives once in a step, and those for each microbatch.
    once, each = (traffic(0), traffic(1) - traffic(0)) if rates is not None else (0.0, 0.0)

    def cost(one: Config) -> tuple[float, bool, int]:
        again = flops.recomputed(one, stage, vocab_size, shards)
        number = getattr(one, stage).training.accumulation_steps
        seconds = 0.0
        if rates is not None:
            computing = (flops.training(one, stage, vocab_size) + again) * tokens
            exchange = (once + number * each) / rates.interconnect
            seconds = max(computing / (mesh.size * rates.flops), exchange)
        return seconds, again > 0, number

    every = [with_choice(config, dict(zip(given, some, strict=True))) for some in values]
    return sorted(every, key=cost)


def least_seconds(
    program: jax.stages.Compiled | None,
    config: Config,
    stage: str,
    mesh: Mesh,
    vocab_size: int,
    rates: Accelerator | None,
) -> float:
    """The least time of a compiled step, by computing, memory and network at the peak `rates`.

    NaN without a program or rates, and with a line on stdout if the program's text cannot be read.
    """
    if program is None or rates is None:
        return math.nan
    try:
        read = hlo.Program.of_compiled(program)
        received = sum(one.moved for one in read.collectives(mesh.size))
        moved = memory_traffic.bytes_moved(read)
    except (ArithmeticError, AssertionError, LookupError, RecursionError, ValueError) as error:
        # The text differs between compilers and their versions. It only serves an estimate, without which a step can be chosen.
        reason = typed_reason_of(error)
        print(
            f"{stage}: the compiled program's text cannot be read ({reason}): its time is not estimated",
            flush=True,
        )
        return math.nan
    section = getattr(config, stage)
    tokens = section.training.batch_size * section.data.block_tokens
    again = flops.recomputed(config, stage, vocab_size, num_row_shards(mesh))
    computed = (flops.training(config, stage, vocab_size) + again) * tokens / mesh.size
    return max(limits(rates, computed, moved, received).values())


class Fitted(NamedTuple):
    """What `fit_to_memory` found.

    Attributes:
      config: the fastest candidate that fits; if none does, the one that needs least memory.
      need: what this candidate needs.
      fits: whether it fits.
    """

    config: Config
    need: Need
    fits: bool


def _largest(need: Need) -> Need:
    """The largest values of all processes; NaN where one of them is."""
    return Need(*np.max(multihost.all_gather(need), axis=0).tolist())


def fit_to_memory(
    every: list[Config], stage: str, available: float, measure: Callable[[Config], Need]
) -> Fitted:
    """The fastest candidate that fits: the first of each value of `lm.model.remat` that fits is considered.

    Without times, the first candidate that fits is taken. All processes must call it; they measure the same candidates in the
    same order, because each decision rests on the largest needs that any of them has measured.

    Args:
      every: the configs to try, in the order of `candidates`.
      stage: "autoencoder" or "lm".
      available: bytes of one device that the step may take; must be equal on all processes.
      measure: compiles a candidate's step, and returns what it needs.
    """
    least: Fitted | None = None
    fitting: dict[str, Fitted] = {}
    # By value of `lm.model.remat`, the latest measured candidate: its number of microbatches, and the memory it needed.
    known: dict[str, tuple[int, Need]] = {}
    for one in every:
        number = getattr(one, stage).training.accumulation_steps
        way = one.lm.model.remat
        if way in fitting:
            continue
        if way in known:
            fewer, need = known[way]
            # Besides the arguments, a microbatch of half the rows needs at least half as much memory. A candidate that cannot
            # fit by this estimate is not compiled.
            if number > fewer and need.arguments + need.rest * fewer / number > available:
                continue
        need = _largest(measure(one))
        if need.total <= available:
            fitting[way] = Fitted(one, need, True)
            if math.isnan(need.seconds):
                break
        known[way] = number, need
        if least is None or need.total < least.need.total:
            least = Fitted(one, need, False)
    if fitting:
        return min(fitting.values(), key=lambda found: found.need.seconds)
    assert least is not None
    return least


class FittedStep(NamedTuple):
    """A step that fits into the memory of the devices that this run has.

    Attributes:
      config: the recipe, with its automatic keys chosen.
      need: the memory that the step needs.
      compiled: the step.
    """

    config: Config
    need: Need
    compiled: jax.stages.Compiled


def available_here() -> float:
    """Bytes that a program may take of each device, by the smallest memory of all processes, which must all call it."""
    share = _SHARE_OF_HOST if jax.devices()[0].platform == "cpu" else SHARE
    return share * min(multihost.all_gather(memory_here()))


def check_backbone(config: Config, vocab_size: int, mesh: Mesh, available: float) -> None:
    """Raises `UserError` if stage 2 cannot fit, whatever its automatic keys, so that stage 1 is not trained in vain.

    It counts the parameters, gradients and moments of the transformer's products and token embeddings alone, and traces nothing.
    """
    body = config.lm.model
    width = body.hidden_size
    # A product has two FLOPs for each weight.
    weights = flops.backbone(body, seen=0) / 2 + vocab_size * width
    # Parameters, gradients and two moments, in float32.
    state = 4 * 4 * weights
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if state / (fsdp * tensor) > available:
        raise UserError(
            f"lm: parameters, gradients and optimizer of lm.model.num_layers={body.num_layers} with lm.model.hidden_size={width} take over "
            f"{state / (fsdp * tensor) / 2**30:.2f} GiB a device, and a step may take {available / 2**30:.2f} GiB: give more devices along "
            f"mesh.fsdp (now {fsdp}), or a smaller model"
        )


def fit_here(
    config: Config,
    stage: str,
    tokenizer: Tokenizer | Vocabulary,
    frozen: Params,
    key: Array,
    mesh: Mesh,
) -> FittedStep:
    """Chooses the automatic keys of a stage for the devices that this run has. Prints a line before it compiles, and the choice.

    Args:
      config: the recipe.
      stage: "autoencoder" or "lm".
      tokenizer: the tokenizer or its vocabulary.
      frozen: arrays or shapes of the parameters that the stage reads and does not train.
      key: the random key of the stage's training.
      mesh: the devices; must be the current mesh (`jax.set_mesh`).

    Raises:
      AgreedError: if no candidate fits.
    """
    programs: dict[Config, jax.stages.Compiled | None] = {}
    began = time.monotonic()
    print(f"{stage}: compiling the training step", flush=True)

    def measure(one: Config) -> Need:
        task, _, optimizer = stage_of(one, stage, tokenizer)
        section = getattr(one, stage)
        program = step_program(
            task, optimizer, section.training, section.data, frozen, key, tokenizer.pad_id, mesh
        )
        arguments = bytes_of(program.arguments)
        compiled = compile_program(program.step.lower(*program.arguments), arguments)
        programs[one] = compiled.program
        seconds = least_seconds(compiled.program, one, stage, mesh, tokenizer.vocab_size, rates)
        return Need(arguments, sum(compiled.memory.values()), seconds)

    # The first of all processes' devices, so that all processes choose the same.
    rates = accelerator(jax.devices()[0].device_kind, mesh.size)
    available = available_here()
    every = candidates(config, stage, mesh, tokenizer.vocab_size, rates)
    found = fit_to_memory(every, stage, available, measure)
    values = ", ".join(f"{name}={value}" for name, value in chosen(found.config, stage).items())
    size = f"{found.need.total / 2**30:.2f} GiB of {available / 2**30:.2f} GiB a device"
    program = programs[found.config]
    # A compiler may refuse on one process what it compiles on another; all have to raise the error.
    is_compiled = all(multihost.all_gather(program is not None))
    if not found.fits or not is_compiled:
        raise multihost.AgreedError(
            f"{stage}: a training step does not fit into memory: {values} needs {size}. More devices along mesh.fsdp (now "
            f"{mesh.shape['fsdp']}) would split parameters and optimizer further; if all these keys are set by hand, they are used without this check"
        )
    seconds = time.monotonic() - began
    print(f"{stage}: {values}, {size} (compiled in {seconds:.0f} s)", flush=True)
    assert program is not None
    return FittedStep(found.config, found.need, program)
