"""The suite `generate`: `calm_jax.Generator` reads prompts of 32 tokens and continues them, at T = 1 and T = 1/2.

A case is `gen:T:BATCH:SAMPLER`; at T = 1, and for the baseline, there is no choice of a sampler. Time to the first chunk is
that of a stream: reading the prompts, one chunk, and its way to the host. Text is not decoded, and no text ends early.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax

from benchmarks.measure import (
    Cases,
    Options,
    Record,
    fresh_params,
    measured,
    random_tokens,
    with_flops,
)
from calm_jax import Continuation, Generator
from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import Tokenizer, Vocabulary, vocabulary
from calm_jax.errors import UserError
from calm_jax.parallel.mesh import make_mesh
from calm_jax.run.continuous_batch import mesh_of_params
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.samplers import check_sampler

_PROMPT_TOKENS = 32
_TEMPERATURES = (1.0, 0.5)


class _NoText(Tokenizer):
    """A tokenizer that decodes every id to no text, and whose eos no model generates, so that no text ends early."""

    kind = "none"

    def __init__(self, words: Vocabulary):
        super().__init__(b"")
        self.vocab_size, self.pad_id = words
        self.bos_id, self.eos_id = 0, -1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def _decode_text(self, ids: list[int]) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the suite; `sampler` is empty where there is no choice."""

    temperature: float
    batch: int
    sampler: str

    @property
    def name(self) -> str:
        """`gen:T:BATCH:SAMPLER`."""
        parts = ["gen", f"{self.temperature:g}", str(self.batch), self.sampler]
        return ":".join(filter(None, parts))


def config_of(options: Options) -> Config:
    """The config of the workdir, or of the recipe without one."""
    folder = options.workdir
    return Workdir(pathlib.Path(folder)).config if folder else resolve(options.tree)


def grid(options: Options, config: Config) -> list[Case]:
    """All cases.

    Raises:
      UserError: for an unknown sampler, or if the model's context is too short.
    """
    for sampler in options.samplers:
        check_sampler("--samplers", sampler)
    size, block = config.chunk_size, config.lm.data.block_tokens
    if -(-_PROMPT_TOKENS // size) - (-options.new_tokens // size) > block // size:
        raise UserError(
            f"--new_tokens={options.new_tokens}: after prompts of {_PROMPT_TOKENS} tokens they exceed the context, "
            f"lm.data.block_tokens={block}"
        )
    return [
        Case(temperature, batch, sampler)
        for temperature in _TEMPERATURES
        for batch in options.batches
        for sampler in (options.samplers if temperature < 1 and config.has_autoencoder else ("",))
    ]


def cases(options: Options) -> Cases:
    """Every temperature, batch and sampler, with one model."""
    config = config_of(options)
    model = functools.cache(functools.partial(generator_of, config, options.workdir))
    return {
        case.name: functools.partial(_generate, options, config, model, case)
        for case in grid(options, config)
    }


def generator_of(config: Config, folder: str) -> Generator:
    """The generator of a workdir, or one with fresh parameters; its tokenizer decodes to no text."""
    if folder:
        generator = Generator.load(folder)
        words = Vocabulary(generator.tokenizer.vocab_size, generator.tokenizer.pad_id)
        generator.tokenizer = _NoText(words)
        return generator
    words, mesh = vocabulary(config.tokenizer), make_mesh(config.mesh)
    key = jax.random.key(config.seed)

    with jax.set_mesh(mesh):
        task, frozen = make_lm_task(config, words), {}
        if config.has_autoencoder:
            autoencoder = make_autoencoder_task(config, words)
            frozen = {"params": fresh_params(autoencoder, key, mesh)}
        return Generator(task, fresh_params(task, key, mesh), frozen, _NoText(words), config)


def _generate(
    options: Options, config: Config, model: Callable[[], Generator], case: Case
) -> list[Record]:
    generator, new = model(), options.new_tokens
    words = Vocabulary(generator.tokenizer.vocab_size, generator.tokenizer.pad_id)
    prompts = random_tokens(words, case.batch, _PROMPT_TOKENS).tolist()
    chosen = dataclasses.replace(
        config.sample,
        temperature=case.temperature,
        sampler=case.sampler or config.sample.sampler,
        max_tokens=new,
        stop=(),
        batch_size=case.batch,
    )
    done: list[Continuation] = []

    def run() -> None:
        done[:] = generator.generate(prompts, chosen)

    def first_chunk() -> float:
        began = time.perf_counter()
        next(generator.generate(prompts, chosen, stream=True))
        return time.perf_counter() - began

    tokens = case.batch * new
    mesh = mesh_of_params(generator.params)
    size = 1 if mesh is None else mesh.size
    one = measured("generate", case.name, run, options, tokens, config.compute_dtype, size)
    # A stream calls a program of its own, which the first call compiles.
    first_chunk()
    waits = [first_chunk() for _ in range(options.repeats)]
    one["first_chunk_ms"] = 1e3 * statistics.median(waits)
    one["draws"] = draws = _mean([count for text in done for count in text.draws])
    # Decoded tokens are counted, and K of them are a decoded chunk.
    decoded = _mean([count for text in done for count in text.decoded]) / config.chunk_size
    cost = functools.partial(flops.inference, config, words.vocab_size, flops.Count.OURS)
    reading = cost(context=_PROMPT_TOKENS // 2, draws=0, decoded=0)["backbone"] * _PROMPT_TOKENS
    writing = sum(cost(context=_PROMPT_TOKENS + new // 2, draws=draws, decoded=decoded).values())
    return [with_flops(one, case.batch * (reading + new * writing))]


def _mean(counts: Sequence[int]) -> float:
    return sum(counts) / len(counts) if counts else math.nan
