"""The accuracy-diversity trade-off of temperature sampling (paper, section 5 and its figure).

For every sampler at every temperature: how often a sample is right (accuracy), how often two samples are the same
(collision, which is a lack of diversity), and what they cost. P contexts of a block, R = 2P rows (two samples of each
context), K tokens per chunk.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from calm_jax import brier
from calm_jax.data.packing import BlockSource
from calm_jax.errors import UserError
from calm_jax.evaluation.evaluator import EvalConfig, add_sums, part_of
from calm_jax.models.kv_cache import SegmentIds
from calm_jax.parallel import multihost
from calm_jax.parallel.signals import poll
from calm_jax.rng import stream
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import FIXED_POOL, MOST_COMPARED, SamplerConfig
from calm_jax.sampling.decode import Bind
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.sampling.search import Sampled
from calm_jax.sampling.temperature import check_temperature, split_exponent
from calm_jax.tasks import LmTask, Params
from calm_jax.tasks.language_model import documents_of


def ways(config: EvalConfig, sampler: SamplerConfig, has_autoencoder: bool) -> list[SamplerConfig]:
    """The sampler configs to measure.

    Args:
        config: its `temperatures`, `samplers` and, for samplers of one pool, `candidates` are combined.
        sampler: all other options.
        has_autoencoder: False for the autoregressive baseline, which needs no sampler: temperatures only.

    Returns:
        All combinations that can be computed; T = 1 only once, as every sampler is then one draw of the model. None shows
        candidates, which would be decoded for nothing, and none scales the token prior: the model's own law is measured.

    Raises:
        UserError: for a temperature that a sampler does not take, or too many candidates.
    """
    sampler = dataclasses.replace(sampler, shown_candidates=0, token_prior_scale=1.0)
    if has_autoencoder and max(config.candidates) > MOST_COMPARED:
        raise UserError(
            f"eval.candidates={config.candidates}: at most {MOST_COMPARED} draws can be compared in pairs"
        )
    chosen = []
    for temperature in config.temperatures:
        at_temperature = dataclasses.replace(sampler, temperature=temperature)
        with _named(config):
            if has_autoencoder:
                check_temperature(temperature)
            else:
                at_temperature.check_softmax_head()
        chosen += _ways_at(config, at_temperature) if has_autoencoder else [at_temperature]
    return chosen


@contextlib.contextmanager
def _named(config: EvalConfig) -> Iterator[None]:
    """Errors about a temperature name the key that it comes from."""
    try:
        yield
    except UserError as error:
        raise UserError(f"eval.temperatures={config.temperatures}: {error}") from error


def _ways_at(config: EvalConfig, sampler: SamplerConfig) -> list[SamplerConfig]:
    """`ways` at the temperature of `sampler`, for a latent head."""
    chosen = []
    temperature = sampler.temperature
    # At T = 1 every sampler is one draw of the model.
    names = (sampler.sampler,) if temperature == 1 else config.samplers
    for name in names:
        if name == "published" and split_exponent(temperature)[1]:
            print(
                f"plane: skipping sampler='published' at temperature {temperature:g}: it supports only 1, 1/2, 1/3, ..."
            )
            continue
        has_sizes = name in FIXED_POOL and temperature != 1
        for size in config.candidates if has_sizes else (sampler.num_candidates,):
            way = dataclasses.replace(sampler, sampler=name, num_candidates=size)
            with _named(config):
                way.check_latent_head()
            chosen.append(way)
    return chosen


@functools.partial(jax.jit, static_argnames=("bind",))
def _read(bind: Bind, params: Any, frozen: Any, token_1LK: Array, documents: SegmentIds | None):
    """`brier.read` for one block."""
    return brier.read(bind(params, frozen), token_1LK, documents)


@functools.partial(jax.jit, static_argnames=("bind", "config"))
def _sample(
    bind: Bind,
    params: Any,
    frozen: Any,
    h_1LD,
    cache,
    chunk_P: Array,
    key_P: Array,
    config: SamplerConfig,
) -> Sampled:
    """Draws two samples of the four tokens after each context; a sample's later chunks are drawn given its earlier ones.

    chunk_P: the index of the first chunk to sample, for each context.

    Returns:
        `tokens` [R, 4 or more], the two samples of a context in successive rows; `draws`, `decoded` and `exact` (how many
        chunks are exact), summed over a sample's chunks, [R].
    """
    model: ChunkModel = bind(params, frozen)
    chunk_R = jnp.repeat(chunk_P, 2)
    key_R = jax.vmap(lambda key: jax.random.split(key))(key_P).reshape(-1)
    h_RD = h_1LD[0, chunk_R - 1]
    active_R = jnp.ones(len(chunk_R), bool)

    def step_key_R(step: int) -> Array:
        return jax.vmap(jax.random.fold_in, (0, None))(key_R, step)

    own = [sample_chunk(model, h_RD, step_key_R(0), active_R, config)]
    num_chunks = brier.chunks_of(own[0].tokens.shape[1])
    for step in range(1, num_chunks):
        token_RJK = jnp.stack([chunk.tokens for chunk in own], axis=1)

        # Under `vmap` over the rows, the cache of the block is stored once.
        def after(seen: Array, token_JK: Array) -> Array:
            fork = model.fork(cache, seen[None], num_chunks - 1)
            return model.advance(token_JK[None], fork)[0][0, -1]

        h_RD = jax.vmap(after)(chunk_R, token_RJK)
        own.append(sample_chunk(model, h_RD, step_key_R(step), active_R, config))
    return Sampled(
        jnp.concatenate([chunk.tokens for chunk in own], axis=1),
        sum(chunk.draws for chunk in own),  # type: ignore[arg-type]  # `sum` of no chunks would be 0
        sum(chunk.decoded for chunk in own),  # type: ignore[arg-type]
        sum(chunk.exact.astype(jnp.int32) for chunk in own),  # type: ignore[arg-type]
    )


@functools.partial(jax.jit, static_argnames=("bind", "num_draws"))
def _collision(
    bind: Bind, params: Any, frozen: Any, h_PD: Array, key_P: Array, num_draws: int
) -> Array:
    """The share of equal pairs among N draws of the next chunk in each context, [P]."""
    model = bind(params, frozen)

    def of_one(xs: tuple[Array, Array]) -> Array:
        h_D, key = xs
        return brier.collisions(model.draw(h_D[None], num_draws, key[None])[0])[-1]

    return jax.lax.map(of_one, (h_PD, key_P))


@dataclasses.dataclass(frozen=True)
class Contexts:
    """The contexts of one block.

    Attributes:
        token_1LK: the block.
        documents: as in `brier.read`.
        chunk_P: the index of the chunk after each context.
        target_P4: the true four tokens after each context.
        counted_P4: bool, whether their first n tokens are text (see `brier.counted`).
        key_P: a random key per context.
    """

    token_1LK: np.ndarray
    documents: SegmentIds | None
    chunk_P: np.ndarray
    target_P4: np.ndarray
    counted_P4: np.ndarray
    key_P: Array


def contexts_of(
    blocks: BlockSource, task: LmTask, config: EvalConfig, pad_id: int
) -> list[Contexts]:
    """About `plane_contexts` contexts, evenly spaced in evenly spaced blocks; the same number from each block.

    Args:
        blocks: the split whose contexts are continued.
        task: the language model's task.
        config: `config.eval`.
        pad_id: the pad token, which is not scored.

    Raises:
        UserError: if no context has four tokens after it.
    """
    chunk_size = task.chunk_size
    num_tokens = blocks[0]["tokens"].shape[0]
    protocol = dataclasses.replace(config.published, inner_starts=False)
    starts_P = protocol.starts(num_tokens, chunk_size)
    if not len(starts_P):
        raise UserError(
            f"eval.temperatures={config.temperatures}: no block of {num_tokens} tokens has a context with four tokens after it, "
            "so the accuracy-diversity plane has nothing to measure: give --config.eval.temperatures='()'"
        )
    num_blocks = min(len(blocks), -(-config.plane_contexts // min(len(starts_P), 16)))
    each = min(len(starts_P), -(-config.plane_contexts // num_blocks))
    key = stream(config.seed, "plane")
    found = []
    for index in part_of(len(blocks), num_blocks):
        # The places are shifted from block to block, so that contexts of every length are measured.
        own_P = starts_P[
            [(place + index) % len(starts_P) for place in part_of(len(starts_P), each)]
        ]
        block = blocks[index]
        found.append(
            Contexts(
                block["tokens"].reshape(1, -1, chunk_size),
                documents_of({name: row[None] for name, row in block.items()}, chunk_size),
                own_P // chunk_size,
                block["targets"][brier.windows(own_P)],
                brier.counted(block["targets"][None], own_P, pad_id)[0],
                jax.random.split(jax.random.fold_in(key, index), len(own_P)),
            )
        )
    return found


def measure(
    task: LmTask,
    params: Params,
    frozen: Params,
    contexts: list[Contexts],
    config: EvalConfig,
    chosen: list[SamplerConfig],
    mesh: Mesh,
) -> dict[str, Any]:
    """Measures the points of the trade-off; prints a line for each.

    Args:
        task: the language model's task.
        params: its trained parameters.
        frozen: its frozen parameters; empty for the autoregressive baseline.
        contexts: from `contexts_of`.
        config: `config.eval`.
        chosen: the sampler configs to measure (see `ways`).
        mesh: the devices.

    Returns:
        "contexts": how many contexts there are. "points": a dict for each config, with `accuracy` and `collision`, the
        geometric means over n = 1 to 4 of `P(x = y)` and `P(x = x')` for the first n tokens, in per cent, and their
        standard errors (blocks as clusters); per chunk, `draws`, `decoded` (in whole chunks) and `seconds`; `exact`, the
        share of chunks that are exact (see `Sampled.exact`). "collision_probability" (latent heads): how often
        two draws of the next chunk are equal, the mean and quantiles over contexts.
    """
    has_autoencoder = bool(frozen)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def read(one: Contexts) -> tuple[Array, Any]:
        # Anew for each point, as the caches of all blocks may not fit into a device's memory.
        given = jax.device_put((one.token_1LK, one.documents), replicated)
        return jax.block_until_ready(_read(task.bind, params, frozen, *given))

    points = []
    for way in chosen:
        points.append(_point(task, params, frozen, contexts, read, way))
        print(_line(points[-1]), flush=True)
    result: dict[str, Any] = {
        "contexts": sum(len(one.chunk_P) for one in contexts),
        "points": points,
    }
    if has_autoencoder:
        num_draws = max(config.candidates)
        probability = np.concatenate(
            [
                multihost.fetch_global(
                    _collision(
                        task.bind,
                        params,
                        frozen,
                        read(one)[0][0, one.chunk_P - 1],
                        one.key_P,
                        num_draws,
                    )
                )
                for one in contexts
            ]
        )
        result["collision_probability"] = {
            "draws": num_draws,
            "mean": float(probability.mean()),
            **{
                f"quantile_{share}": float(np.quantile(probability, share / 100))
                for share in (10, 25, 50, 75, 90)
            },
        }
    return result


def _point(
    task: LmTask,
    params: Params,
    frozen: Params,
    contexts: list[Contexts],
    read: Callable[[Contexts], tuple[Array, Any]],
    way: SamplerConfig,
) -> dict[str, Any]:
    sums: Any
    sums, seconds, num_rows = None, 0.0, 0
    for index, one in enumerate(contexts):
        h_1LD, cache = read(one)
        run = functools.partial(
            _sample, task.bind, params, frozen, h_1LD, cache, one.chunk_P, one.key_P, way
        )
        if index == 0:
            jax.block_until_ready(run())  # compiles
        began = time.perf_counter()
        sampled = jax.block_until_ready(run())
        seconds += time.perf_counter() - began
        # Before the next block is read.
        del run, h_1LD, cache
        sampled = multihost.fetch_global(sampled)
        poll()
        token_P2T = np.asarray(sampled.tokens).reshape(len(one.chunk_P), 2, -1)
        token_P24 = token_P2T[..., : brier.ORDERS]
        right_P4 = np.cumprod(token_P24 == one.target_P4[:, None], axis=-1).mean(1)
        same_P4 = np.cumprod(token_P24[:, 0] == token_P24[:, 1], axis=-1)
        rows = len(sampled.tokens)
        num_rows += rows
        counted_1P4 = jnp.asarray(one.counted_P4[None])
        new: dict[str, Any] = {
            name: brier.block_sums(jnp.asarray(terms_P4[None], jnp.float32), counted_1P4)
            for name, terms_P4 in (("accuracy", right_P4), ("collision", same_P4))
        }
        for name in ("draws", "decoded", "exact"):
            new[name] = getattr(sampled, name).sum()
        sums = add_sums(sums, new)
    num_chunks = num_rows * brier.chunks_of(task.chunk_size)
    point: dict[str, Any] = {
        "sampler": way.sampler if frozen else "softmax",
        "temperature": way.temperature,
        "candidates": way.num_candidates if frozen and way.sampler in FIXED_POOL else 0,
    }
    if way.temperature == 1 and frozen:
        point |= {"sampler": "model", "candidates": 0}
    for name in ("accuracy", "collision"):
        values = brier.score(sums[name])
        point |= {name: values.brierlm, f"{name}_error": values.standard_error}
        point |= {f"{name}_{n}": value for n, value in enumerate(values.brier, 1)}
    return point | {
        "draws": sums["draws"] / num_chunks,
        "decoded": sums["decoded"] / num_chunks / task.chunk_size,
        "exact": sums["exact"] / num_chunks,
        "seconds": seconds / num_chunks,
    }


def name_of(point: dict[str, Any]) -> str:
    """The name of a point's sampler, with its number of candidates if it has one."""
    return f"{point['sampler']} {point['candidates']}" if point["candidates"] else point["sampler"]


def _line(point: dict[str, Any]) -> str:
    return (
        f"plane: T {point['temperature']:.2g} {name_of(point)}: accuracy {point['accuracy']:.2f}, collision "
        f"{point['collision']:.2f}, {point['draws']:.1f} draws"
    )
