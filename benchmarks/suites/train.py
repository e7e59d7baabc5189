"""The suite `train`: a training step of each task and head, on the local devices and random tokens.

`python -m calm_jax.plan` with the same recipe and a --topology predicts these figures.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from benchmarks.measure import (
    Cases,
    Options,
    Record,
    fresh_params,
    measured,
    random_tokens,
    with_flops,
)
from calm_jax.build import stage_of
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import Vocabulary, vocabulary
from calm_jax.parallel.mesh import global_batch, make_mesh, rows_here
from calm_jax.planning import fitting
from calm_jax.planning.planner import check_stage
from calm_jax.tasks import Batch, Params
from calm_jax.training.step import TrainState, init_state, jit_step, make_step
from configs import common

# The stage and the head of each case.
CASES = {
    "calm": ("lm", "energy"),
    "calm-diffusion": ("lm", "diffusion"),
    "calm-flow": ("lm", "flow"),
    "ae": ("autoencoder", ""),
    "ar": ("lm", "softmax"),
}


def variant(tree: ConfigDict, arguments: str) -> ConfigDict:
    """A copy of a recipe with another head or chunk size (see `configs.common.variant`)."""
    tree = copy.deepcopy(tree)
    if arguments == "head=softmax":
        # Values that the config of a baseline may have, in place of CALM's.
        tree.stage, tree.autoencoder.checkpoint, tree.eval.skip_last_start = "all", "", False
    return common.variant(tree, arguments)


def whole_batches(tree: ConfigDict) -> ConfigDict:
    """A copy of a recipe that takes each batch at once and recomputes the least that is chosen automatically, so that nothing is
    compiled to choose this."""
    tree = copy.deepcopy(tree)
    for section in (tree.autoencoder, tree.lm):
        section.training.accumulation_steps = 1
    tree.lm.model.remat = "dots" if jax.default_backend() == "cpu" else "none"
    return tree


def cases(options: Options) -> Cases:
    """Every task and head. For a recipe of the baseline, only the baseline; with --stage, only this stage of the recipe."""
    tree = options.tree
    if options.stage:
        return {
            options.stage: functools.partial(_measure, options, options.stage, tree, options.stage)
        }
    if tree.lm.head.name == "softmax":
        return {"ar": functools.partial(_measure, options, "ar", tree, "lm")}
    return {
        name: functools.partial(
            _measure, options, name, variant(tree, f"head={head}" if head else ""), stage
        )
        for name, (stage, head) in CASES.items()
    }


@dataclasses.dataclass
class Trained:
    """A stage's step with its arguments; `advance` takes one step and keeps the new state.

    Attributes:
      mesh: the mesh of the devices.
      step: the jitted step; it reuses the memory of the state.
      state, frozen, batch: its arguments.
    """

    mesh: Mesh
    step: Any
    state: TrainState
    frozen: Params
    batch: Batch

    def advance(self) -> TrainState:
        """Takes a step."""
        with jax.set_mesh(self.mesh):
            self.state = self.step(self.state, self.frozen, self.batch)
        return self.state


def fresh(config: Config, stage: str, words: Vocabulary) -> Trained:
    """A stage's step before its first call, with fresh parameters and a batch of random tokens.

    Raises:
      UserError: if the recipe lacks the stage, or the mesh does not suit the devices, the batch or the attention.
    """
    training, block = getattr(config, stage).training, getattr(config, stage).data.block_tokens
    mesh = make_mesh(config.mesh)
    check_stage(config, stage, mesh)
    task, source, optimizer = stage_of(config, stage, words)
    key, size = jax.random.key(config.seed), training.batch_size
    tokens_BT = random_tokens(words, size, block)[rows_here(size, mesh)]
    with jax.set_mesh(mesh):
        frozen = {} if source is None else {"params": fresh_params(source, key, mesh)}
        if fitting.is_automatic(config, stage):
            config = fitting.fit_here(config, stage, words, frozen, key, mesh).config
            training = getattr(config, stage).training
            task, _, _ = stage_of(config, stage, words)
        batch = global_batch({"tokens": tokens_BT, "targets": tokens_BT}, size, mesh)
        state = init_state(task, optimizer, key, mesh)
        step = jit_step(make_step(task, optimizer, training, key, words.pad_id), state, mesh)
    return Trained(mesh, step, state, frozen, batch)


def _measure(options: Options, name: str, tree: ConfigDict, stage: str) -> list[Record]:
    config = resolve(tree)
    words = vocabulary(config.tokenizer)
    trained = fresh(config, stage, words)
    tokens = trained.batch["tokens"].size
    dtype, devices = config.compute_dtype, trained.mesh.size
    one = measured("train", name, trained.advance, options, tokens, dtype, devices)
    return [with_flops(one, flops.training(config, stage, words.vocab_size) * tokens)]
