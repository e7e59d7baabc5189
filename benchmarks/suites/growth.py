"""The suite `growth`: how the time of a training step and of decoding grows with each size, one changed at a time.

A case is `grow:CASE:SIZE`, with a record for each value of the size. The last one has two exponents, fitted by least squares to
the logarithms: of the time, and of the FLOPs by formula. An exponent of 1 means that twice the size takes twice the time. An
exponent of the time well above that of the FLOPs is a sign of work that the formula does not count, such as reading memory; one
below it, of a fixed cost. Decoding is the time of one chunk: that of a text of 32 chunks less that of a text of one.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.measure import Cases, Options, Record, random_tokens, record, timed
from benchmarks.suites.generate import generator_of
from benchmarks.suites.train import CASES, fresh, variant, whole_batches
from calm_jax import Generator
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import vocabulary

# Chunks of the longer of the two texts whose times give that of a decoded chunk.
_CHUNKS = 32


class Axis(NamedTuple):
    """A size that is changed.

    Attributes:
      case: "calm", "ae", "ar" (training steps, as in the suite `train`) or "decode".
      name: the size's name.
      key: the config key; "k" for the chunk size; for decoding one of `_DECODED`.
      values: of the size.
    """

    case: str
    name: str
    key: str
    values: tuple[int, ...]


AXES = (
    Axis("calm", "batch", "lm.training.batch_size", (1, 2, 4, 8)),
    Axis("calm", "block", "lm.data.block_tokens", (256, 512, 1024, 2048)),
    Axis("calm", "N", "lm.head.num_samples", (2, 4, 8, 16)),
    Axis("calm", "M", "lm.head.num_target_samples", (25, 50, 100, 200)),
    Axis("calm", "K", "k", (1, 2, 4, 8)),
    Axis("calm", "layers", "lm.model.num_layers", (3, 6, 12)),
    Axis("calm", "vocabulary", "tokenizer.vocab_size", (1024, 4096, 16384)),
    Axis("ae", "batch", "autoencoder.training.batch_size", (2, 4, 8, 16)),
    Axis("ae", "vocabulary", "tokenizer.vocab_size", (1024, 4096, 16384)),
    Axis("ar", "batch", "lm.training.batch_size", (1, 2, 4, 8)),
    Axis("ar", "block", "lm.data.block_tokens", (256, 512, 1024, 2048)),
    Axis("ar", "vocabulary", "tokenizer.vocab_size", (1024, 4096, 16384)),
    Axis("decode", "batch", "batch", (1, 8, 64)),
    Axis("decode", "prompt", "prompt", (32, 128, 320)),
    Axis("decode", "draws", "draws", (50, 100, 200, 400)),
)
# The sizes of decoding where they are not changed: texts at once, tokens of a prompt, draws of a chunk.
_DECODED = {"batch": 8, "prompt": 32, "draws": 1}


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(values) over log(sizes) by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def cases(options: Options) -> Cases:
    """One case for each size of the recipe; for one of the baseline, those of its training step."""
    tree = whole_batches(options.tree)
    model = functools.cache(lambda: generator_of(resolve(tree), ""))
    is_fixed = {"vocabulary": bool(tree.tokenizer.path)}
    own = ("ar",) if tree.lm.head.name == "softmax" else ("calm", "ae", "ar", "decode")
    axes = [one for one in AXES if one.case in own and not is_fixed.get(one.name)]
    return {
        f"grow:{axis.case}:{axis.name}": functools.partial(_grow, options, axis, tree, model)
        for axis in axes
    }


def _grow(
    options: Options, axis: Axis, tree: ConfigDict, model: Callable[[], Generator]
) -> list[Record]:
    points = []
    for value in axis.values:
        if axis.case == "decode":
            points.append(decoded_chunk(options, model(), resolve(tree), axis.key, value))
        else:
            points.append(step(options, axis.case, tree, axis.key, value))
        jax.clear_caches()
    records = [
        record("growth", f"{axis.case} {axis.name}={value}", times, flops=computed)
        for value, (times, computed) in zip(axis.values, points, strict=True)
    ]
    times, computed = zip(*points, strict=True)
    records[-1]["exponent"] = exponent(axis.values, [statistics.median(one) for one in times])
    records[-1]["flops_exponent"] = exponent(axis.values, computed)
    return records


def _times(options: Options, run: Callable[[], Any]) -> list[float]:
    """The seconds of each call, after one that compiles and one that warms up."""
    timed(run, 2)
    return timed(run, options.repeats, options.seconds)


def step(
    options: Options, case: str, tree: ConfigDict, key: str, value: int
) -> tuple[list[float], float]:
    """The seconds of each call and the FLOPs of a training step where one size has another value."""
    stage, head = CASES[case]
    arguments = f"head={head}" + (f",k={value}" if key == "k" else "")
    tree = variant(tree, "" if stage == "autoencoder" else arguments)
    if key != "k":
        tree.update_from_flattened_dict({key: value})
    config = resolve(tree)
    words = vocabulary(config.tokenizer)
    trained = fresh(config, stage, words)
    tokens = trained.batch["tokens"].size
    computed = tokens * flops.training(config, stage, words.vocab_size)
    return _times(options, trained.advance), computed


def decoded_chunk(
    options: Options, generator: Generator, config: Config, size: str, value: int
) -> tuple[list[float], float]:
    """The seconds of each call and the FLOPs of one decoded chunk of all texts where one size has another value."""
    sizes = _DECODED | {size: value}
    words = vocabulary(config.tokenizer)
    prompts = random_tokens(words, sizes["batch"], sizes["prompt"]).tolist()

    def seconds(num_chunks: int) -> list[float]:
        chosen = dataclasses.replace(
            config.sample,
            temperature=1.0 if sizes["draws"] == 1 else 0.5,
            sampler="published",
            num_candidates=sizes["draws"],
            max_tokens=num_chunks * config.chunk_size,
            batch_size=sizes["batch"],
            stop=(),
        )
        return _times(options, lambda: generator.generate(prompts, chosen))

    drawn = sizes["draws"]
    parts = flops.inference(
        config, words.vocab_size, flops.Count.OURS, sizes["prompt"], draws=drawn, decoded=drawn
    )
    computed = sizes["batch"] * config.chunk_size * sum(parts.values())
    # A text of one chunk takes as long as the reading of the prompts and the first chunk of the longer text.
    begin = statistics.median(seconds(1))
    return [(whole - begin) / (_CHUNKS - 1) for whole in seconds(_CHUNKS)], computed
