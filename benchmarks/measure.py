"""Helpers of the suites of `python -m benchmarks`: timing, peak memory, the rate of a matrix product, facts of the machine."""

import datetime
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from jax.sharding import Mesh
from ml_collections import ConfigDict

from benchmarks import ROOT
from calm_jax.cli import progress
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.parallel import cpu
from calm_jax.parallel.devices import accelerator, num_cores, peak_resident
from calm_jax.parallel.mesh import shardings
from calm_jax.tasks import Params, Task

# Rows, inner size and columns of the timed product: on a CPU that of the small config's MLP, elsewhere one that fills the device.
_PRODUCT_ON_CPU, _PRODUCT_ELSEWHERE = (2048, 256, 688), (8192, 8192, 8192)
_PRODUCT_RUNS = 30

# The results of a case: the names of suite and case, "ms" (median) and further numbers, NaN for an unknown one.
Record = dict[str, Any]
Cases = dict[str, Callable[[], list[Record]]]


@dataclass(frozen=True)
class Options:
    """The options of a suite, from the flags of `python -m benchmarks`.

    Attributes:
      tree: the recipe, not yet resolved.
      stage: "lm" or "autoencoder" to train only this stage, with the recipe's own head; empty for every task and head.
      repeats: timed calls of a case.
      seconds: no further call is timed after so many seconds of timed calls.
      rounds: fresh processes of each kind.
      samplers: the samplers of generation at T = 1/2.
      batches: numbers of prompts that are continued together.
      new_tokens: generated for each prompt.
      workdir: the workdir of a trained model to generate with; empty for random parameters.
    """

    tree: ConfigDict
    stage: str
    repeats: int
    seconds: float
    rounds: int
    samplers: tuple[str, ...]
    batches: tuple[int, ...]
    new_tokens: int
    workdir: str


def timed(run: Callable[[], object], repeats: int, limit: float = math.inf) -> list[float]:
    """The seconds of each of `repeats` calls; fewer, but at least one, if they take more than `limit` seconds together."""
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) <= limit:
        began = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - began)
    return seconds


def random_tokens(words: Vocabulary, *shape: int) -> np.ndarray:
    """Token ids, int32, equally distributed over the vocabulary without the pad."""
    tokens = np.random.default_rng(0).integers(0, words.vocab_size - 1, shape, np.int32)
    return tokens + (tokens >= words.pad_id)


def fresh_params(task: Task, key: jax.Array, mesh: Mesh) -> Params:
    """Fresh parameters of a task; every shard is made on its own device of the mesh, which must be set."""
    layout = shardings(jax.eval_shape(task.init, key), mesh)
    return jax.jit(task.init, out_shardings=layout)(key)


def product_rate(dtype: str) -> float:
    """FLOPs per second of one matrix product on one device; in float32 on a CPU, elsewhere in `dtype`."""
    on_cpu = jax.default_backend() == "cpu"
    m, k, n = _PRODUCT_ON_CPU if on_cpu else _PRODUCT_ELSEWHERE
    keys = jax.random.split(jax.random.key(0))
    used = jnp.float32 if on_cpu else jnp.dtype(dtype)
    left, right = jax.random.normal(keys[0], (m, k), used), jax.random.normal(keys[1], (k, n), used)
    product = jax.jit(jnp.matmul)
    timed(lambda: product(left, right), 2)
    return 2 * m * k * n / statistics.median(timed(lambda: product(left, right), _PRODUCT_RUNS))


def _peak_of_device() -> float:
    """The largest memory in use on the first device so far, in MiB; NaN if the device does not report it, as CPUs do not."""
    used = jax.local_devices()[0].memory_stats() or {}
    return used.get("peak_bytes_in_use", math.nan) / 2**20


def record(suite: str, case: str, seconds: Sequence[float], **values: float) -> Record:
    """The record of a case from the seconds of its calls, with further values."""
    return {
        "suite": suite,
        "case": case,
        "ms": 1e3 * statistics.median(seconds),
        "fastest_ms": 1e3 * min(seconds),
        "slowest_ms": 1e3 * max(seconds),
        "runs": len(seconds),
        **values,
    }


def measured(
    suite: str,
    case: str,
    run: Callable[[], object],
    options: Options,
    tokens: float,
    dtype: str,
    devices: int = 1,
) -> Record:
    """Times a case: a first call that compiles, a second one to warm up, then those whose median counts.

    Args:
      suite: its name.
      case: its name.
      run: the call.
      options: how often to call.
      tokens: the number of tokens that one call processes.
      dtype: the dtype of the case's matrix products.
      devices: the number of devices that take part.

    Returns:
      A record without FLOPs (see `with_flops`). `compile_s` is the first call less a median one. Peaks of memory are those
      of the process so far, with all earlier cases.
    """
    rate = product_rate(dtype)
    [first] = timed(run, 1)
    if first < options.seconds:
        timed(run, 1)
    seconds = timed(run, options.repeats, options.seconds)
    median = statistics.median(seconds)
    return record(
        suite,
        case,
        seconds,
        compile_s=max(0.0, first - median),
        tokens_per_s=tokens / median,
        product_flops_per_s=rate,
        devices=devices,
        rss_mb=peak_resident() / 2**20,
        device_mb=_peak_of_device(),
    )


def with_flops(one: Record, flops: float) -> Record:
    """Adds the FLOPs of a call, by formula, and their rate as a share of the product's rate and of the known peak (MFU)."""
    rate = flops / (one["ms"] / 1e3) / one["devices"]
    known = accelerator(jax.devices()[0].device_kind)
    return one | {
        "flops": flops,
        "flops_per_s": rate * one["devices"],
        "share": rate / one["product_flops_per_s"],
        "mfu": rate / known.flops if known else math.nan,
    }


# --- The machine


def _commit() -> str:
    """The commit of the clone, with "-dirty" if files differ from it; "unknown" outside of one."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def facts() -> dict[str, Any]:
    """When, from which commit and on which machine a measurement is made. Starts no device."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "cpu": cpu.model(),
        "cores": num_cores(),
        # With such a folder, programs of an earlier run are not compiled again.
        "compilation_cache": os.environ.get("JAX_COMPILATION_CACHE_DIR", ""),
    }


# --- The table


def _number(form: str, scale: float = 1) -> Callable[[float], str]:
    return lambda value: form.format(value * scale)


# Heading, key of the record, and how a value is written.
_COLUMNS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("ms", "ms", _number("{:.4g}")),
    ("fastest", "fastest_ms", _number("{:.4g}")),
    ("slowest", "slowest_ms", _number("{:.4g}")),
    ("runs", "runs", _number("{}")),
    ("compile s", "compile_s", _number("{:.1f}")),
    ("first chunk ms", "first_chunk_ms", _number("{:.4g}")),
    ("tokens/s", "tokens_per_s", _number("{:,.0f}")),
    ("GFLOP", "flops", _number("{:.3g}", 1e-9)),
    ("share of matmul", "share", _number("{:.0%}")),
    ("share of step", "of_step", _number("{:.0%}")),
    ("exponent", "exponent", _number("{:.2f}")),
    ("FLOPs exponent", "flops_exponent", _number("{:.2f}")),
    ("MFU", "mfu", _number("{:.1%}")),
    ("peak MiB", "rss_mb", _number("{:.0f}")),
    ("device MiB", "device_mb", _number("{:.0f}")),
)


def _known(one: Mapping[str, Any], key: str) -> bool:
    value = one.get(key)
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def print_table(records: Sequence[Record]) -> None:
    """Prints a line for each record, with the columns of which some record has a value."""
    shown = [row for row in _COLUMNS if any(_known(one, row[1]) for one in records)]
    table = rich.table.Table()
    table.add_column("case", no_wrap=True)
    for heading, _, _ in shown:
        table.add_column(heading, justify="right")
    for one in records:
        cells = [write(one[key]) if _known(one, key) else "" for _, key, write in shown]
        table.add_row(one["case"], *cells)
    progress.console().print(table, highlight=False)
