"""Times BrierLM for K < 4, where an n-gram spans several chunks: all starts of a block together against a loop over starts.

    python -m benchmarks.brierlm [--tokens=2048] [--hidden_size=256] [--num_layers=4] ...

The loop calls the same compiled continuation once for each start, as the published code does, but keeps the prefix's KV
cache and never waits for the host in between. It is timed over `--loop_starts` evenly spaced starts and scaled to all of
them. The parameters are freshly initialised, as the time does not depend on them. Times are medians of `--repeats` runs,
without compilation.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import rich.table
from absl import app, flags

from calm_jax import brier
from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import parse_flags
from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.tasks import LmTask, Params
from configs import quickstart

_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of a block", lower_bound=16)
_ROWS = flags.DEFINE_integer("rows", 1, "blocks in a batch")
_HIDDEN = flags.DEFINE_integer("hidden_size", 256, "width of the transformer")
_LAYERS = flags.DEFINE_integer("num_layers", 4, "layers of the transformer")
_PATHS = flags.DEFINE_integer("paths_at_once", 256, "starts that are continued in one batch")
_LOOP_STARTS = flags.DEFINE_integer("loop_starts", 64, "starts over which the loop is timed")
_REPEATS = flags.DEFINE_integer("repeats", 5, "runs of which the median time is taken")
_MODELS = ("k=1", "k=2", "k=3", "head=softmax")


def _model(arguments: str) -> tuple[LmTask, Params, Params]:
    """The quickstart's task with the sizes of the flags, fresh parameters, and the autoencoder's variables."""
    tree = quickstart.get_config(arguments)
    tree.tokenizer.kind = "bytes"
    tree.lm.model.hidden_size = _HIDDEN.value
    tree.lm.model.intermediate_size = 8 * _HIDDEN.value // 3
    tree.lm.model.num_layers = _LAYERS.value
    config, tokenizer = resolve(tree), ByteTokenizer(b"")
    task = make_lm_task(config, tokenizer, brier.Protocol(num_samples=2))
    frozen = {}
    if config.has_autoencoder:
        autoencoder = make_autoencoder_task(config, tokenizer)
        frozen = {"params": jax.jit(autoencoder.init)(jax.random.key(1))}
    return task, jax.jit(task.init)(jax.random.key(0)), frozen


def _seconds(run: Callable[[], object]) -> float:
    """The median time of a call in seconds, after a first call that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(_REPEATS.value):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _measure(arguments: str) -> tuple[int, float, float]:
    """The number of starts of a block, the seconds of all Brier terms, and the seconds of the loop's continuations."""
    task, params, frozen = _model(arguments)
    chunk_size, rows = task.chunk_size, _ROWS.value
    num_chunks = _TOKENS.value // chunk_size
    token_BLK = jax.random.randint(jax.random.key(2), (rows, num_chunks, chunk_size), 0, 256)
    num_draws = brier.chunks_of(chunk_size)
    key_BLJ = jax.random.split(jax.random.key(3), (rows, num_chunks - 1, num_draws))
    starts = task.protocol.starts(num_chunks * chunk_size, chunk_size)

    @jax.jit
    def at_once(params: Params, frozen: Params) -> jax.Array:
        model = task.bind(params, frozen)
        return brier.brier_terms(
            model, token_BLK, key_BLJ, task.protocol, _PATHS.value, _PATHS.value
        )

    @jax.jit
    def prefill(params: Params, frozen: Params) -> tuple[jax.Array, Any]:
        model = task.bind(params, frozen)
        h_BLD, cache = model.advance(token_BLK[:, :-1], model.empty_cache(rows, 0, num_chunks - 1))
        return h_BLD, cache

    @jax.jit
    def one_start(
        params: Params, frozen: Params, h_BLD: jax.Array, cache: Any, seen: jax.Array
    ) -> jax.Array:
        model = task.bind(params, frozen)
        h_BD, key_BJ = h_BLD[:, seen - 1], key_BLJ[:, seen - 1]
        sample_BSK = model.draw(h_BD, task.protocol.num_samples, key_BJ[:, 0])
        return brier.path_collisions(model, cache, seen, h_BD, sample_BSK, key_BJ)

    h_BLD, cache = prefill(params, frozen)
    timed = starts[:: max(1, len(starts) // _LOOP_STARTS.value)] // chunk_size
    seen = [jnp.int32(place) for place in timed]

    def loop() -> list[jax.Array]:
        return [one_start(params, frozen, h_BLD, cache, place) for place in seen]

    whole = _seconds(functools.partial(at_once, params, frozen))
    return len(starts), whole, _seconds(loop) * len(starts) / len(seen)


@command
def main(argv: list[str]) -> None:
    table = rich.table.Table()
    for name in ("model", "starts", "together", "loop", "ratio"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for arguments in _MODELS:
        starts, whole, loop = _measure(arguments)
        row = (arguments, f"{starts}", f"{whole:.2f} s", f"{loop:.1f} s", f"{loop / whole:.0f}")
        table.add_row(*row)
    print(
        f"{_ROWS.value} x {_TOKENS.value} tokens, width {_HIDDEN.value}, {_LAYERS.value} layers, on "
        f"{jax.devices()[0].device_kind}"
    )
    progress.console().print(table)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
