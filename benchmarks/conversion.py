"""Measures time and peak memory of converting a checkpoint of random numbers that has the sizes of a recipe.

    python -m benchmarks.conversion --recipe=calm_xl --tokenizer=tokenizer.model --folder=DIR [--dtype=bfloat16]

The conversion should read every byte of the source once, write every byte of the workdir once, and hold the parameters
and one further array in memory.
"""

import dataclasses
import importlib
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time
from typing import Any

import flax.traverse_util
import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl import app, flags

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.config import Config, resolve
from calm_jax.data.tokenizers import Tokenizer, open_tokenizer
from calm_jax.errors import UserError
from calm_jax.interop import names, published

_RECIPE = flags.DEFINE_enum(
    "recipe",
    "calm_xl",
    ["quickstart", "bench_small", "calm_ablation", "calm_m", "calm_l", "calm_xl"],
    "recipe in configs/, of a model with an autoencoder",
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "bytes", "tokenizer file, or bytes; it sets the vocabulary size"
)
_FOLDER = flags.DEFINE_string(
    "folder", "", "where to write checkpoint and workdir; both are deleted afterwards"
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16", "float16"], "dtype of the checkpoint"
)
_SHARD_BYTES = 2**31
_GIB = 2**30


class _Shards:
    """Writes tensors to shards of `_SHARD_BYTES`, and then the index."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._size = folder, 0
        self._pending: dict[str, np.ndarray] = {}
        self._where: dict[str, str] = {}

    def add(self, name: str, tensor: np.ndarray) -> None:
        self._pending[name] = tensor
        self._size += tensor.nbytes
        if self._size >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        file = f"model-{len(set(self._where.values())):05}.safetensors"
        safetensors.numpy.save_file(self._pending, self._folder / file)
        self._where |= dict.fromkeys(self._pending, file)
        self._pending, self._size = {}, 0

    def close(self) -> None:
        self.flush()
        index = {"metadata": {}, "weight_map": self._where}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_random(folder: pathlib.Path, config: Config, tokenizer: Tokenizer) -> tuple[int, int]:
    """Writes a checkpoint of random numbers.

    Returns:
      The number of parameters, and the size of the largest array in elements.
    """
    folder.mkdir(parents=True)
    values = published.lm_values(config, tokenizer, "nowhere")
    head: Any = config.lm.head
    (folder / "config.json").write_text(json.dumps(values))
    lm = (
        names.calm_rows(config.lm.model, head),
        make_lm_task(config, tokenizer),
    )
    autoencoder = (
        names.prefixed(names.autoencoder_rows(config.autoencoder.model), names.AUTOENCODER_PREFIX),
        make_autoencoder_task(config, tokenizer),
    )
    dtype = np.dtype(getattr(ml_dtypes, _DTYPE.value, None) or _DTYPE.value)
    random, shards, sizes = np.random.default_rng(0), _Shards(folder), []
    for rows, task in (lm, autoencoder):
        shapes = jax.eval_shape(task.init, jax.random.key(0))
        flat = flax.traverse_util.flatten_dict(shapes, sep="/")
        for row in rows:
            shape = flat[row.parameter].shape
            sizes.append(int(np.prod(shape)))
            one = np.broadcast_to(np.float32(0), shape[1:] if row.num_layers else shape)
            for name in row.published_names():
                like = row.transform.write(one)
                tensor = random.standard_normal(like.shape, np.float32) * np.float32(0.02)
                if row.parameter == "embed/tokens/embedding":
                    # As in published checkpoints, and a condition of the conversion.
                    tensor[tokenizer.pad_id] = 0
                shards.add(name, tensor.astype(dtype))
    shards.close()
    return sum(sizes), max(sizes)


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_FOLDER, "a folder with room for the checkpoint twice")
    source, workdir = folder / "random-checkpoint", folder / "random-workdir"
    for path in (source, workdir):
        if path.exists():
            raise UserError(f"{path} exists: delete it")
    recipe = importlib.import_module(f"configs.{_RECIPE.value}").get_config()
    tokenizer, tokenizer_config = open_tokenizer(_TOKENIZER.value)
    recipe.tokenizer.update(dataclasses.asdict(tokenizer_config))
    try:
        total, largest = _write_random(source, resolve(recipe), tokenizer)
        command_line = [sys.executable, "-m", "calm_jax.interop.convert"]
        options = [f"--source={source}", f"--workdir={workdir}", f"--tokenizer={_TOKENIZER.value}"]
        began = time.monotonic()
        if subprocess.run(command_line + options, check=False).returncode:
            raise UserError("the conversion failed; the line above says why")
        seconds = time.monotonic() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        bound = 4 * (total + largest) + _GIB
        print(
            f"{_RECIPE.value}, {_DTYPE.value}: {total:,} parameters in {seconds:.0f} s, peak {peak / _GIB:.2f} GiB; "
            f"parameters {4 * total / _GIB:.2f} + largest {4 * largest / _GIB:.2f} + 1 = {bound / _GIB:.2f} GiB"
        )
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(workdir, ignore_errors=True)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
