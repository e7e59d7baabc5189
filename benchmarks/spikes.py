"""How a loss spike affects training, and what skipping updates or rolling back would gain.

    python -m benchmarks.spikes [--seeds=3]

Trains a tiny transformer on text of a few words. For five steps the batches are random bytes, or the learning rate is 30 times as
high. The table shows the held-out loss afterwards, without a spike and for three responses to it: "as it is", the usual training;
"skipped", updates are left out whose gradient norm is above five times the median of the last 50; "gone back", training returns
to the state before the spike and leaves out its steps.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import rich.table
from absl import app, flags

from calm_jax.build import make_lm_task
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import parse_flags
from calm_jax.config import resolve
from calm_jax.data.tokenizers import KINDS
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.tasks.base import ratio
from calm_jax.training.optimizer import make_optimizer
from calm_jax.training.step import TrainState, init_state, make_step
from tests import tiny_recipe

_SEEDS = flags.DEFINE_integer("seeds", 3, "texts of each kind", lower_bound=1)

_STEPS, _SPIKE, _LENGTH = 300, 150, 5
# Steps after whose update the held-out loss is computed.
_SHOWN = (150, 155, 160, 175, 200, 250, 300)
_HIGHER, _FACTOR, _LAST = 30.0, 5.0, 50
_ROWS, _TOKENS = 16, 32
_MESH = MeshConfig(-1, 1, 1)
_WORDS = (b"def ", b"class ", b"return ", b"self", b".", b"(", b"):\n", b"value ", b"= ", b"name")


def _batch(chance: np.random.Generator, is_random: bool = False) -> dict[str, np.ndarray]:
    if is_random:
        tokens = chance.integers(0, 256, (_ROWS, _TOKENS))
    else:
        lines = [b"".join(chance.choice(_WORDS, _TOKENS)) for _ in range(_ROWS)]
        tokens = np.stack([np.frombuffer(line, np.uint8)[:_TOKENS] for line in lines])
    return dict.fromkeys(("tokens", "targets"), tokens.astype(np.int32))


@functools.cache
def _programs() -> tuple[Callable, Callable, Callable, TrainState]:
    """The step, the step with a higher learning rate, the held-out loss of parameters, and the initial state."""
    config = resolve(tiny_recipe.get_config("*.none,head=softmax"))
    tokenizer = KINDS["bytes"](b"")
    task = make_lm_task(config, tokenizer)
    rate = dataclasses.replace(
        config.lm.optimizer, learning_rate=3e-3, warmup_steps=20, schedule="constant"
    )
    higher = dataclasses.replace(rate, learning_rate=rate.learning_rate * _HIGHER)
    key = jax.random.key(0)
    usual, spiking = (
        jax.jit(
            make_step(task, make_optimizer(one, _STEPS), config.lm.training, key, tokenizer.pad_id)
        )
        for one in (rate, higher)
    )
    held_out = jax.tree.map(jnp.asarray, _batch(np.random.default_rng(10**6)))
    key_B = jax.random.split(key, _ROWS)
    loss = jax.jit(lambda params: task.loss(params, {}, held_out, key_B)["loss"])
    optimizer, mesh = make_optimizer(rate, _STEPS), make_mesh(_MESH)
    return usual, spiking, loss, init_state(task, optimizer, key, mesh)


def _trained(spike: str, response: str, seed: int) -> list[float]:
    """Held-out losses, in nats a token, after the steps `_SHOWN`."""
    usual, spiking, loss, state = _programs()
    norms: list[float] = []
    losses = []
    for number in range(1, _STEPS + 1):
        is_spike = _SPIKE < number <= _SPIKE + _LENGTH
        # A run that has gone back leaves the steps of the spike out.
        if not (is_spike and response == "gone back" and spike != "none"):
            batch = _batch(np.random.default_rng((seed, number)), is_spike and spike == "batches")
            step = spiking if is_spike and spike == "rate" else usual
            after = step(state, {}, batch)
            norm = float(ratio(after.metrics["gradient_norm"]))
            most = _FACTOR * statistics.median(norms[-_LAST:]) if len(norms) >= _LAST else np.inf
            if response == "skipped" and norm > most:
                after = after._replace(params=state.params, opt_state=state.opt_state)
            # A step adds to the sums of its state: with those of no step its metrics are its own.
            state = after._replace(metrics=state.metrics)
            norms.append(norm)
        if number in _SHOWN:
            losses.append(float(ratio(loss(state.params))))
    return losses


@command
def main(argv: list[str]) -> None:
    table = rich.table.Table(
        "spike", "response", *(f"step {step}" for step in _SHOWN), title="held-out loss"
    )
    kinds = [("none", "as it is"), ("none", "skipped")]
    kinds += [
        (spike, response)
        for spike in ("batches", "rate")
        for response in ("as it is", "skipped", "gone back")
    ]
    with jax.set_mesh(make_mesh(_MESH)):
        for spike, response in kinds:
            means = np.mean(
                [_trained(spike, response, seed) for seed in range(_SEEDS.value)], axis=0
            )
            table.add_row(spike, response, *(f"{mean:.3f}" for mean in means))
    progress.console().print(table)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
