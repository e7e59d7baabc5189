"""Times sampling of a chunk at T = 1/2, by the published sampler and by samplers that do less work.

    python -m benchmarks.sampling --workdir=runs/quickstart [--batches=1,8,64] [--contexts=64] ...
    python -m benchmarks.sampling [--collisions=0.01,0.1,0.5,0.9] ...

With a workdir, a trained model samples after contexts from its validation text. Without one, a head and an autoencoder with
the sizes of the flags and fresh parameters run, and their draws are replaced: with probability sqrt(c) by one fixed chunk,
else by random tokens, so that two draws are equal with probability c, as set by --collisions. Times are those of the
sampler without the backbone, per chunk; medians of `--repeats` runs, without compilation.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import rich.table
from absl import app, flags
from jax import Array

from calm_jax.build import make_lm_task
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import parse_flags
from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.run.dataset import Dataset, read_corpus
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir
from calm_jax.sampling import temperature
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SamplerConfig
from calm_jax.sampling.samplers import sample_chunk
from calm_jax.sampling.search import Sampled
from calm_jax.tasks import CalmTask
from calm_jax.tasks.language_model import documents_of
from configs import quickstart

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_COLLISIONS = flags.DEFINE_list(
    "collisions",
    ["0.01", "0.1", "0.5", "0.9"],
    "without a workdir: probabilities that two draws are equal",
)
_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "batch sizes")
_CONTEXTS = flags.DEFINE_integer(
    "contexts", 64, "contexts over which each time is averaged", lower_bound=1
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "runs of which the median time is taken", lower_bound=1
)
_CANDIDATES = flags.DEFINE_integer("num_candidates", 200, "candidates of one pool, N")
_MAX_DRAWS = flags.DEFINE_integer("max_draws", 216, "largest number of draws of the pooled sampler")
_AT_ONCE = flags.DEFINE_integer("draws_at_once", 256, "draws computed in one batch")
# Sizes of the model without a workdir.
_VOCABULARY = flags.DEFINE_integer("vocab_size", 4096, "vocabulary size")
_WIDTH = flags.DEFINE_integer("hidden_size", 256, "width of head and autoencoder")

_TEMPERATURE = 0.5

# A function of a model's variables that returns the model as samplers use it. The variables can then be arguments of a jitted
# function.
Bind = Callable[[Any], ChunkModel]


def _trained(folder: str) -> tuple[Bind, Any, Array]:
    """A workdir's model, its variables, and hidden states [R, D] after contexts from its validation text."""
    generator, workdir = Generator.load(folder), Workdir(pathlib.Path(folder))
    task = generator.task
    if not isinstance(task, CalmTask):
        raise UserError(
            f"--workdir={folder}: a softmax head has probabilities and needs no sampler"
        )
    config = workdir.config
    blocks = Dataset(config, read_corpus(config, ("lm",)), workdir.tokenizer).validation("lm")
    hidden = []
    for place in range(_CONTEXTS.value):
        block = blocks[place * len(blocks) // _CONTEXTS.value]
        tokens_1LK = jnp.asarray(block["tokens"].reshape(1, -1, config.chunk_size))
        documents = documents_of({k: x[None] for k, x in block.items()}, config.chunk_size)
        h_BLD = task.hidden(generator.params, tokens_1LK, documents)
        hidden.append(h_BLD[0, (7 * place) % h_BLD.shape[1]])
    variables = generator.params, generator.frozen
    return lambda variables: task.bind(*variables), variables, jnp.stack(hidden)


def _task_of_sizes() -> CalmTask:
    """The quickstart's task with the sizes of the flags, K = 4, the energy head with four blocks, and latents of size 64."""
    tree = quickstart.get_config("head=energy,k=4")
    tree.compute_dtype = "float32"
    tree.tokenizer.kind = "bytes"
    autoencoder, model = tree.autoencoder.model, tree.lm.model
    autoencoder.latent_size = 64
    autoencoder.hidden_size = model.hidden_size = _WIDTH.value
    autoencoder.intermediate_size = 5 * _WIDTH.value // 2
    tree.lm.head.num_blocks = 4
    tokenizer = ByteTokenizer(b"")
    tokenizer.vocab_size = _VOCABULARY.value
    task = make_lm_task(resolve(tree), tokenizer)
    assert isinstance(task, CalmTask)
    return task


def _synthetic(collision: float) -> tuple[Bind, Any, Array]:
    """A model, its variables and hidden states [R, D], for which two draws are equal with probability `collision`.

    Head and autoencoder are computed, but the draws come from a known distribution.
    """
    task = _task_of_sizes()
    params = jax.jit(task.init)(jax.random.key(0))
    tokens_PK = jnp.zeros((1, task.chunk_size), jnp.int32)
    frozen = jax.jit(task.autoencoder.init)(jax.random.key(1), tokens_PK)
    # With normalised rows, the most likely token of an embedding is its own.
    table_VD = frozen["params"]["embed"]["embedding"]
    table_VD /= jnp.linalg.norm(table_VD, axis=-1, keepdims=True)
    frozen["params"]["embed"]["embedding"] = table_VD
    common = math.sqrt(collision)

    def bind(variables: Any) -> ChunkModel:
        model = task.bind(*variables)

        def latents(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
            latent_PNZ = model.latents(h_PD, num_draws, key_P, noise_scale)

            def tokens(key: Array) -> Array:
                choice, key = jax.random.split(jax.random.fold_in(key, 1))
                shape = (num_draws, task.chunk_size)
                other_NK = jax.random.randint(key, shape, 0, _VOCABULARY.value)
                is_common_N1 = jax.random.uniform(choice, (num_draws, 1)) < common
                return jnp.where(is_common_N1, 0, other_NK).astype(jnp.float32)

            return jnp.concatenate([latent_PNZ, jax.vmap(tokens)(key_P)], axis=-1)

        def unfold(latent_RZ: Array) -> Array:
            token_RK = latent_RZ[:, -task.chunk_size :].astype(int)
            # The unfolded latents are computed, as in a real model, but too small to change the result.
            nothing_RKD = 1e-30 * model.unfold(latent_RZ[:, : -task.chunk_size])
            return variables[1]["params"]["embed"]["embedding"][token_RK] + nothing_RKD

        return dataclasses.replace(model, latents=latents, unfold=unfold)

    h_RD = jax.random.normal(jax.random.key(2), (_CONTEXTS.value, _WIDTH.value))
    return bind, (params, frozen), h_RD


def _head_once_a_draw(model: ChunkModel) -> ChunkModel:
    """The model, with a head that computes for every draw even the parts that do not depend on its noise."""

    def latents(h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        key_PN = jax.vmap(lambda key: jax.random.split(key, num_draws))(key_P)
        # The barrier keeps the compiler from seeing that the rows are equal.
        h_RD = jax.lax.optimization_barrier(jnp.repeat(h_PD, num_draws, axis=0))
        latent_R1Z = model.latents(h_RD, 1, key_PN.reshape(-1), noise_scale)
        return latent_R1Z.reshape(len(h_PD), num_draws, -1)

    return dataclasses.replace(model, latents=latents)


def _decode_all(model: ChunkModel, h_BD: Array, key_B: Array, config: SamplerConfig) -> Sampled:
    """The published sampler, with every token of every candidate decoded."""
    draw_key_B, pick_key_B = jax.vmap(jax.random.split, out_axes=1)(key_B)
    token_BNK = model.draw(h_BD, config.num_candidates, draw_key_B)
    weight_BN, _ = temperature.log_weights(
        temperature.count_equal(token_BNK), config.temperature, leave_out=False
    )
    index_B = temperature.pick(weight_BN, pick_key_B)
    chosen_BK = jnp.take_along_axis(token_BNK, index_B[:, None, None], axis=1)[:, 0]
    num_draws = jnp.full(len(h_BD), config.num_candidates)
    return Sampled(chosen_BK, num_draws, token_BNK.shape[-1] * num_draws, num_draws < 0)


def _by(sampler: str) -> Callable[..., Sampled]:
    """`sample_chunk` with one of the samplers."""

    def sample(model: ChunkModel, h_BD: Array, key_B: Array, config: SamplerConfig) -> Sampled:
        config = dataclasses.replace(config, sampler=sampler)
        return sample_chunk(model, h_BD, key_B, jnp.ones(len(h_BD), bool), config)

    return sample


# The ways to sample: from model, hidden states, keys and config to the sampled chunks.
_WAYS: dict[str, Callable[..., Sampled]] = {
    "published, head once a draw": lambda model, *rest: _decode_all(
        _head_once_a_draw(model), *rest
    ),
    "published, all decoded": _decode_all,
    "published": _by("published"),
    "batch": _by("batch"),
    "growing": _by("growing"),
    "pooled": _by("pooled"),
}


def _measure(
    bind: Bind, variables: Any, h_RD: Array, batch: int, way: Callable[..., Sampled]
) -> dict[str, float]:
    """Milliseconds, draws and decoded chunks for each chunk, and the share of exactly sampled chunks."""
    config = SamplerConfig(
        temperature=_TEMPERATURE,
        sampler="pooled",
        num_candidates=_CANDIDATES.value,
        max_draws=_MAX_DRAWS.value,
        draws_at_once=_AT_ONCE.value,
        top_p=1.0,
    )

    @jax.jit
    def run(variables: Any, h_BD: Array, key_B: Array) -> Sampled:
        return way(bind(variables), h_BD, key_B, config)

    key_R = jax.random.split(jax.random.key(3), len(h_RD))
    batches = [slice(first, first + batch) for first in range(0, len(h_RD) - batch + 1, batch)]
    jax.block_until_ready(run(variables, h_RD[:batch], key_R[:batch]))
    times = []
    for _ in range(_REPEATS.value):
        began = time.perf_counter()
        sampled = [
            jax.block_until_ready(run(variables, h_RD[rows], key_R[rows])) for rows in batches
        ]
        times.append(time.perf_counter() - began)
    num_rows = batch * len(batches)

    def mean(name: str) -> float:
        return float(sum(getattr(one, name).sum() for one in sampled)) / num_rows

    return {
        "ms": 1e3 * statistics.median(times) / num_rows,
        "draws": mean("draws"),
        "decoded": mean("decoded") / sampled[0].tokens.shape[1],
        "exact": mean("exact"),
    }


def _collision(text: str) -> float:
    """One value of --collisions. Raises `UserError` unless it is a probability."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(f"--collisions={text} must be a number from 0 to 1")
    return value


def _batch(text: str) -> int:
    """One value of --batches. Raises `UserError` unless it is a size that the contexts fill."""
    if not text.isdecimal() or not 1 <= int(text) <= _CONTEXTS.value:
        raise UserError(
            f"--batches={text} must be a whole number from 1 to --contexts={_CONTEXTS.value}"
        )
    return int(text)


@command
def main(argv: list[str]) -> None:
    local_path(_WORKDIR.value, "--workdir")
    models = (
        {_WORKDIR.value: lambda: _trained(_WORKDIR.value)}
        if _WORKDIR.value
        else {
            f"collision {text}": functools.partial(_synthetic, _collision(text))
            for text in _COLLISIONS.value
        }
    )
    batches = [_batch(text) for text in _BATCHES.value]
    table = rich.table.Table(title=f"T = 1/2, ms a chunk, on {jax.devices()[0].device_kind}")
    for name in ("model", "sampler", "draws", "decoded", "exact", *map("batch {}".format, batches)):
        table.add_column(name, justify="left" if name in ("model", "sampler") else "right")
    for name, make in models.items():
        bind, variables, h_RD = make()
        for label, way in _WAYS.items():
            each = [_measure(bind, variables, h_RD, batch, way) for batch in batches]
            costs = (
                f"{each[0]['draws']:.1f}",
                f"{each[0]['decoded']:.1f}",
                f"{each[0]['exact']:.0%}",
            )
            table.add_row(name, label, *costs, *(f"{one['ms']:.2f}" for one in each))
    progress.console().print(table)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
