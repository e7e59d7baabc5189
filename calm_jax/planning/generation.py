"""Plans generation on hardware that this machine lacks: compiles prefill and decode for it, and bounds their time.

The bound is arithmetic: a chunk of K tokens takes at least as long as reading every weight and the whole cache once, and
as computing its FLOPs. The network of a diffusion or flow head is evaluated many times for a chunk, and its weights are read
each time: they are taken not to stay on the chip from one evaluation to the next.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import Config
from calm_jax.cost import flops, sizes
from calm_jax.data.tokenizers import vocabulary
from calm_jax.models.stack import for_generation
from calm_jax.parallel.mesh import (
    divisible,
    make_mesh,
    num_row_shards,
    sharded_shapes,
)
from calm_jax.planning import fitting, hlo, memory_traffic
from calm_jax.planning.planner import COMPILER_OPTIONS, compile_for
from calm_jax.planning.result import limits
from calm_jax.planning.topology import Topology
from calm_jax.sampling.decode import (
    CHUNKS_PER_CALL,
    CHUNKS_READ_TOGETHER,
    decode,
    prefill,
    with_room,
)
from calm_jax.sampling.samplers import fewest_draws

# The batches, before they are rounded up to what a mesh can split, and the temperatures that are planned.
_BATCHES, TEMPERATURES = (1, 8, 64), (1.0, 0.5)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Time and memory of generating one chunk of K tokens in every row of a batch, on given hardware.

    Attributes:
      batch: rows, a multiple of the parts into which the mesh splits rows.
      temperature: T.
      draws: latents that are drawn and decoded for each chunk. At T < 1 these are the fewest that the sampler makes; the
        autoregressive baseline makes one.
      tokens: new tokens of all rows.
      limits: lower bounds in seconds at the peak rates, by resource: for the FLOPs of `calm_jax.cost.flops`, for one reading
        of weights and cache, and for the compiled program's collectives (NaN if it does not fit), where the body of a loop
        over draws counts once.
      one_pass: bytes of weights and cache that each device reads, with those of the head for each evaluation of its network.
      moved: bytes that the compiled program moves, for one of the chunks that a call generates. NaN if it does not fit,
        and at T < 1, where the number of iterations of its loops depends on the draws.
      prefill: bytes of one device that reading prompts of half the context needs.
      needed: bytes of one device that decoding needs; NaN if the prefill, or the cache for the whole context, does not fit.
      available: bytes of one device that a program may use.
    """

    batch: int
    temperature: float
    draws: int
    tokens: int
    limits: dict[str, float]
    one_pass: float
    moved: float
    prefill: float
    needed: float
    available: float

    @property
    def fits(self) -> bool:
        return self.prefill <= self.available and self.needed <= self.available

    @property
    def limit(self) -> str:
        """The one of `limits` that takes longest."""
        return max(self.limits, key=lambda name: self.limits[name])

    @property
    def tokens_per_second(self) -> float:
        """At most, over all rows."""
        return self.tokens / self.limits[self.limit]


# On GPUs, decoding keeps XLA's default, which compiles matrix products of few rows itself (Triton) instead of calling a library,
# as it was seen to do on an H100.
_DECODE_OPTIONS = COMPILER_OPTIONS | {"cuda": {"xla_gpu_autotune_level": 0}}


def mesh_of(config: Config, topology: Topology) -> Mesh:
    """The mesh of generation on all devices of `topology` (`calm_jax.planning.fitting.generation_mesh`)."""
    vocab_size = vocabulary(config.tokenizer).vocab_size
    devices = topology.devices()
    axes = fitting.generation_mesh(config, vocab_size, devices, topology.memory)
    return make_mesh(axes, devices)


def planned_batches(mesh: Mesh) -> list[int]:
    """The batches that are planned on a mesh, each of them once."""
    return sorted({divisible(batch, mesh) for batch in _BATCHES})


class _Prefilled(NamedTuple):
    """The need of the prefill, and the arguments of `decode` after it, which do not depend on the sampler.

    Attributes:
      prefill: bytes of one device that the prefill needs.
      available: bytes of one device that a program may use.
      model: the arguments `bind`, `params` and `frozen` of `decode`.
      state: shapes and layout of the state with room for the whole context; None if the prefill or this state does not fit.
    """

    prefill: float
    available: float
    model: dict[str, Any]
    state: Any


@functools.lru_cache(maxsize=1)
def _prefilled(config: Config, topology: Topology, mesh: Mesh, batch: int) -> _Prefilled:
    """Compiles the prefill of `batch` rows. The last one is kept, as it is the same for every temperature."""
    words = vocabulary(config.tokenizer)
    ways, num_chunks = num_row_shards(mesh), config.max_chunks
    key = jax.random.key(0)
    task = make_lm_task(config, words)
    params = jax.eval_shape(
        lambda: for_generation(task.init(key), config.compute_dtype, task.stacks, mesh)
    )
    model = {"bind": task.bind, "params": sharded_shapes(params, mesh), "frozen": {}}
    if config.has_autoencoder:
        autoencoder = make_autoencoder_task(config, words)
        frozen = jax.eval_shape(lambda: for_generation(autoencoder.init(key), "float32", (), mesh))
        model["frozen"] = {"params": sharded_shapes(frozen, mesh)}
    # Prompts of half the context, as many as are read together.
    length = num_chunks // 2
    num_read = min(batch, max(ways, CHUNKS_READ_TOGETHER // length // ways * ways))
    reading = compile_for(
        topology,
        mesh,
        prefill,
        **model,
        prompt_BLK=_replicated(mesh, jnp.int32, num_read, length, config.chunk_size),
        length_B=_replicated(mesh, jnp.int32, num_read),
        window=_replicated(mesh, jnp.int32),
        size=length,
        piece=length,
    )
    state, available = None, reading.available
    if reading.program is not None:
        room = {"state": reading.results, "batch": batch, "size": num_chunks}
        made = compile_for(topology, mesh, with_room, **room)
        state, available = made.results, made.available
    return _Prefilled(reading.needed, available, model, state)


def _replicated(mesh: Mesh, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    layout = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)


def plan_decode(config: Config, topology: Topology, batch: int, temperature: float) -> DecodePlan:
    """Compiles prefill and decode for `batch` rows with a cache for the whole context, on the mesh of `mesh_of`.

    Args:
      config: the recipe.
      topology: the hardware.
      batch: rows; rounded up to a multiple of the parts into which the mesh splits rows.
      temperature: T.

    Raises:
      UserError: if the compiler is not installed, or the options in `config.sample` cannot be computed at T.
    """
    sampler = dataclasses.replace(config.sample.sampler_config, temperature=temperature)
    sampler.check_head(config.has_autoencoder)
    words = vocabulary(config.tokenizer)
    mesh = mesh_of(config, topology)
    batch = divisible(batch, mesh)
    prefill_bytes, available, model, state = _prefilled(config, topology, mesh, batch)
    needed = moved = received = math.nan
    if state is not None:
        decoding = compile_for(
            topology,
            mesh,
            decode,
            _DECODE_OPTIONS,
            **model,
            state=state,
            key_B=_replicated(mesh, jax.random.key(0).dtype, batch),
            limit=_replicated(mesh, jnp.int32),
            num_chunks=CHUNKS_PER_CALL,
            # A `Vocabulary` has no eos; the program is the same for any id.
            eos_id=words.pad_id,
            config=sampler,
        )
        needed, available = decoding.needed, decoding.available
        if decoding.program is not None:
            read = hlo.Program.of_compiled(decoding.program)
            received = sum(one.moved for one in read.collectives(topology.num_devices))
            if temperature == 1:
                moved = memory_traffic.bytes_moved(read, CHUNKS_PER_CALL) / CHUNKS_PER_CALL
    vocab_size, context = words.vocab_size, config.lm.data.block_tokens
    draws = fewest_draws(sampler) if config.has_autoencoder else 1
    per_token = flops.inference(config, vocab_size, flops.Count.OURS, context, draws, draws)
    tokens = batch * config.chunk_size
    one_pass = _weight_bytes(config, vocab_size) / mesh.shape["tensor"]
    one_pass += _cache_bytes(config, batch) / topology.num_devices
    return DecodePlan(
        batch=batch,
        temperature=temperature,
        draws=draws,
        tokens=tokens,
        limits=limits(
            topology.accelerator,
            computed=sum(per_token.values()) * tokens / topology.num_devices,
            moved=one_pass,
            received=received,
        ),
        one_pass=one_pass,
        moved=moved,
        prefill=prefill_bytes,
        needed=needed,
        available=available,
    )


def _weight_bytes(config: Config, vocab_size: int) -> float:
    """Bytes of the weights that are read for a chunk, without the language model's token embeddings: few rows are read."""
    unread = ["token embeddings"]
    if not config.lm.token_prior_weight:
        unread.append("token predictor")
    model = sizes.language_model(config, vocab_size)
    count = sum(size for name, size in model.items() if name not in unread)
    again = flops.head_evaluations(config) - 1
    if again:
        # The layer that takes the hidden state has the same result each time, and compilers compute it once.
        width = config.lm.model.hidden_size
        count += again * (model["head"] - width * (width + 1))
    weights = float(count * jnp.dtype(config.compute_dtype).itemsize)
    if config.has_autoencoder:
        parts = sizes.autoencoder(config, vocab_size)
        # The autoencoder is in float32. Its token embeddings are also the weights of its logits.
        weights += 4.0 * (parts["token embeddings"] + parts["decoder"])
    return weights


def _cache_bytes(config: Config, batch: int) -> float:
    """Bytes of the keys and values of a whole context in `batch` rows."""
    body = config.lm.model
    positions = batch * config.max_chunks
    each = 2 * body.num_layers * body.num_kv_heads * body.head_size
    return float(positions * each * jnp.dtype(config.compute_dtype).itemsize)
