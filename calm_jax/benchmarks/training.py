"""Step time, tokens a second, MFU and memory of a recipe's training, on the devices that are here and over random tokens.

python -m calm_jax.benchmarks.training --config=configs/calm_m.py [--stage=lm] [--steps=20] [--config.KEY=VALUE ...]

`python -m calm_jax.plan` with the same flags and a --topology says what to expect.
"""

import statistics
import time

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from calm_jax import flops, startup
from calm_jax.accelerators import accelerator
from calm_jax.command import command, parse_recipe_flags
from calm_jax.config import resolve
from calm_jax.data.tokenizers import vocabulary
from calm_jax.errors import UserError
from calm_jax.mesh import global_batch, make_mesh, rows_here, shardings
from calm_jax.metrics import duration
from calm_jax.planner import check_stage, stage_of
from calm_jax.step import init_state, jit_step, make_step

_CONFIG = config_flags.DEFINE_config_file("config", None, "recipe: a file with get_config()")
_STAGE = flags.DEFINE_enum("stage", "lm", ["lm", "autoencoder"], "which of the recipe's stages")
_STEPS = flags.DEFINE_integer("steps", 20, "steps to time, after two others", lower_bound=1)
_start_processes = startup.define_flags()


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1 or _CONFIG.value is None:
        raise UserError("give a recipe, --config=configs/calm_m.py, and its keys")
    config, stage = resolve(_CONFIG.value), _STAGE.value
    _start_processes()
    words, training = vocabulary(config.tokenizer), getattr(config, stage).training
    mesh = make_mesh(config.mesh)
    check_stage(config, stage, mesh)
    task, source, optimizer = stage_of(config, stage, words)
    key, size = jax.random.key(config.seed), training.batch_size
    rows, block = rows_here(size, mesh), getattr(config, stage).data.block_tokens
    tokens_BT = np.random.default_rng(0).integers(0, words.pad_id, (size, block), np.int32)[rows]
    with jax.set_mesh(mesh):
        frozen = {}
        if source is not None:
            layout = shardings(jax.eval_shape(source.init, key), mesh)
            frozen = {"params": jax.jit(source.init, out_shardings=layout)(key)}
        batch = global_batch({"tokens": tokens_BT, "targets": tokens_BT}, size, mesh)
        state = init_state(task, optimizer, frozen, batch, key, mesh)
        step = jit_step(make_step(task, optimizer, training, key, words.pad_id), state, mesh)
        print(f"{stage}: compiling for {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
        seconds = []
        for number in range(2 + _STEPS.value):
            began = time.perf_counter()
            state = jax.block_until_ready(step(state, frozen, batch))
            seconds.append(time.perf_counter() - began)
            if number == 0:
                print(f"first step in {duration(seconds[0])}", flush=True)
    median = statistics.median(seconds[2:])
    print(
        f"a step: {median:.4g} s, median of {_STEPS.value} ({min(seconds[2:]):.4g} to {max(seconds[2:]):.4g}); "
        f"{size * block / median:,.0f} tokens a second"
    )
    known = accelerator(jax.devices()[0].device_kind)
    if known is not None:
        work = flops.training(config, stage, words.vocab_size) * size * block
        print(f"MFU {work / median / known.flops / mesh.size:.1%}")
    used = jax.local_devices()[0].memory_stats()
    if used and "peak_bytes_in_use" in used:
        print(f"memory of a device, at most: {used['peak_bytes_in_use'] / 2**30:.2f} GiB")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_recipe_flags)
