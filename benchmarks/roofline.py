"""Compares the planner's estimate of a training step with measured steps: ratios of times between recipes, on one CPU core.

    python -m benchmarks.roofline --output=roofline.json

The file is written after each recipe, and the same command goes on where it was interrupted. Peak FLOP/s and memory bandwidth are
measured on the same core. Times are seconds of processor time on one thread, so that other programs on the machine disturb them
little; the fastest step of each recipe counts.
"""

import itertools
import json
import math
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

# Set before jax is imported: the CPU alone, and one thread for each program.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks import tokens_512
from benchmarks.measure import facts
from benchmarks.suites.train import fresh, whole_batches
from calm_jax.cli.command import command
from calm_jax.cli.files import local_path, write_atomically
from calm_jax.cli.flags import parse_flags
from calm_jax.cli.output import new_file
from calm_jax.config import resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.errors import UserError
from calm_jax.planning import hlo, memory_traffic

_OUTPUT = flags.DEFINE_string("output", "roofline.json", "file to keep the figures in, as JSON")
_REPEATS = flags.DEFINE_integer("repeats", 5, "steps of each recipe", lower_bound=1)

_WORDS = Vocabulary(513, 512)
# Changes of the 512-token recipe; each changes another size, or what is recomputed.
CASES: dict[str, dict[str, Any]] = {
    "512 tokens": {},
    "wider": {"lm.model.hidden_size": 512, "lm.model.intermediate_size": 1376},
    "deeper": {"lm.model.num_layers": 12},
    "more rows": {"lm.training.batch_size": 8},
    "recomputed": {"lm.model.remat": "full", "lm.training.batch_size": 4},
    "longer blocks": {"lm.data.block_tokens": 2048},
}


def _recipe(changes: dict[str, Any]) -> ConfigDict:
    tree = whole_batches(tokens_512.get_config())
    for path, value in changes.items():
        tree.update_from_flattened_dict({path: value})
    return tree


def _fastest(run: Callable[[], Any]) -> float:
    """Processor seconds of the fastest call."""
    times = []
    jax.block_until_ready(run())
    for _ in range(_REPEATS.value):
        began = time.process_time()
        jax.block_until_ready(run())
        times.append(time.process_time() - began)
    return min(times)


def peak_flops() -> float:
    """FLOPs per second of a product of matrices of 1024 x 1024 float32 numbers."""
    x, product = jnp.ones((1024, 1024)), jax.jit(jnp.matmul)
    return 2 * 1024**3 / _fastest(lambda: product(x, x))


def bandwidth() -> float:
    """Bytes per second read and written where 256 MiB are negated in place."""
    negate = jax.jit(jnp.negative, donate_argnums=0)
    kept = [jnp.ones(2**26)]

    def run() -> jax.Array:
        kept[0] = negate(kept[0])
        return kept[0]

    return 2 * kept[0].nbytes / _fastest(run)


def _measure(name: str) -> dict[str, float]:
    """The FLOPs of a step by formula, the bytes that the compiled program moves, and the measured seconds."""
    config = resolve(_recipe(CASES[name]))
    step = fresh(config, "lm", _WORDS)
    with jax.set_mesh(step.mesh):
        compiled = step.step.lower(step.state, step.frozen, step.batch).compile()
    step.step = compiled
    tokens = config.lm.training.batch_size * config.lm.data.block_tokens
    per_token = flops.training(config, "lm", _WORDS.vocab_size)
    per_token += flops.recomputed(config, "lm", _WORDS.vocab_size, 1)
    moved = memory_traffic.bytes_moved(hlo.Program.of_compiled(compiled))
    return {"flops": per_token * tokens, "bytes": moved, "seconds": _fastest(step.advance)}


def errors(measured: list[float], predicted: list[float]) -> list[float]:
    """For each pair of recipes, the factor between the predicted and the measured ratio of their times, minus 1 (at least 0)."""
    both = list(zip(measured, predicted, strict=True))
    return [
        math.exp(abs(math.log((p / q) / (m / n)))) - 1
        for (m, p), (n, q) in itertools.combinations(both, 2)
    ]


def _kept(path: pathlib.Path) -> dict[str, Any]:
    """What an interrupted call has measured. Raises `UserError` for another file."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if {"rates", "cases"} <= kept.keys():
            return kept
    except (ValueError, AttributeError):
        pass
    raise UserError(f"--output={path} is no file of this command: give another name")


@command
def main(argv: list[str]) -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    path = new_file(local_path(_OUTPUT.value, "--output"), "--output", overwrite=True)
    if path.exists():
        kept = _kept(path)
    else:
        kept = facts() | {"rates": {"flops": peak_flops(), "bytes": bandwidth()}, "cases": {}}
    rates, found = kept["rates"], kept["cases"]
    print(f"{rates['flops'] / 1e9:.1f} GFLOP/s, {rates['bytes'] / 1e9:.1f} GB/s", flush=True)
    for name in CASES:
        if name not in found:
            found[name] = _measure(name)
            write_atomically(path, json.dumps(kept, indent=2) + "\n")
        one = found[name]
        computing, moving = (one[kind] / rate for kind, rate in rates.items())
        print(
            f"{name}: computing {computing:.3f} s, moving {moving:.3f} s, measured {one['seconds']:.3f} s",
            flush=True,
        )
    measured = [one["seconds"] for one in found.values()]
    for way, estimate in (("larger time", max), ("sum of times", lambda *parts: sum(parts))):
        estimates = [
            estimate(*(one[kind] / rates[kind] for kind in rates)) for one in found.values()
        ]
        wrong = errors(measured, estimates)
        print(
            f"ratios predicted by the {way}: wrong by {statistics.median(wrong):.0%} (median), {max(wrong):.0%} at most"
        )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
