"""A tiny model with random parameters, for tests that need a trained model."""

import dataclasses
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import Config, resolve
from calm_jax.data.tokenizers import ByteTokenizer, Tokenizer
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir
from calm_jax.tasks import LmTask
from calm_jax.training.checkpoint import save_params
from tests import tiny_recipe, workdirs
from tests.models.networks import random_like


def random_params(task: Any, seed: int) -> dict:
    """Random values for every parameter, because a freshly initialised head draws the same latent every time.

    Those of the head are larger, so that its samples depend visibly on the hidden state.
    """
    return random_like(jax.eval_shape(task.init, jax.random.key(0)), seed, head_std=1.2)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """The arguments of a `Generator`."""

    task: LmTask
    params: dict
    frozen: dict
    tokenizer: Tokenizer
    config: Config

    def generator(self) -> Generator:
        return Generator(self.task, self.params, self.frozen, self.tokenizer, self.config)

    def save(self, folder: pathlib.Path) -> None:
        """Writes the workdir of a trained model."""
        self.tokenizer.save(folder / "tokenizer")
        Workdir(folder).store_config(self.config)
        stages = {"lm": self.params}
        if self.config.has_autoencoder:
            stages["autoencoder"] = self.frozen["params"]
        for stage, params in stages.items():
            save_params(folder / stage, params, {})


@functools.cache
def tiny(arguments: str = "k=4", block_tokens: int = 256) -> Tiny:
    """The model of the tiny recipe, with bytes as tokens and a context of `block_tokens`."""
    tree = tiny_recipe.get_config(f"nowhere/*.txt,{arguments}")
    tree.lm.data.block_tokens = block_tokens
    config = resolve(tree)
    tokenizer = ByteTokenizer(b"")
    task = make_lm_task(config, tokenizer)
    frozen = {}
    if config.has_autoencoder:
        frozen = {"params": random_params(make_autoencoder_task(config, tokenizer), seed=1)}
    return Tiny(task, random_params(task, seed=0), frozen, tokenizer, config)


def run_generate(*commands: list[str]) -> list[tuple[int, str, str]]:
    """(exit status, stdout, stderr) of `python -m calm_jax.generate` with each of these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "commands.json"
        file.write_text(json.dumps(commands), encoding="utf-8")
        return [
            tuple(one) for one in json.loads(workdirs.run("tests.generate_commands", str(file)))
        ]
