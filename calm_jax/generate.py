"""Generates text with a trained model.

python -m calm_jax.generate --workdir=runs/quickstart --prompt='def main(' --max_tokens=128

The continuation of a single prompt is printed while it is generated; those of several prompts are printed in order, each
when it is complete. With --output=FILE.jsonl they are written to that file, one JSON object for each prompt: its text,
tokens, chunks, draws and times (see `calm_jax.run.continuation.Continuation`).

Options without a default are taken from the model's config, section `sample`; configs/common.py describes them.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags

from calm_jax.cli import progress
from calm_jax.cli.files import local_path, read_text
from calm_jax.cli.flags import define_fraction, given_folder, parse_flags
from calm_jax.cli.output import new_file, owned_output, write_result
from calm_jax.cli.signals import tell_of_no_files
from calm_jax.errors import UserError, require_seed
from calm_jax.parallel import startup
from calm_jax.parallel.compilation_cache import set_up_compiler
from calm_jax.parallel.host_memory import keep_freed_memory
from calm_jax.parallel.startup import multihost_command

if TYPE_CHECKING:
    from calm_jax.config import Config
    from calm_jax.run.continuation import Continuation, Prompt
    from calm_jax.run.generator import Generator
    from calm_jax.sampling.config import SampleConfig

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given several times")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file",
    "",
    'text file with one prompt on each line, or .jsonl file with lines {"prompt": TEXT} or {"prompt": [TOKEN IDS]}',
)
_OUTPUT = flags.DEFINE_string("output", "", "write to this .jsonl file instead of the terminal")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the file of --output if it exists")
_SEED = flags.DEFINE_integer("seed", 0, "seed of all random numbers, in [0, 2**32)")
# Each overrides the key of its name in the config's section `sample`.
_OPTIONS = (
    define_fraction(
        "temperature",
        None,
        "in (0, 1] for CALM, such as 0.5 or 1/3; at least 0 for the autoregressive baseline, where 0 means greedy decoding",
    ),
    flags.DEFINE_string(
        "sampler",
        None,
        "how CALM samples below temperature 1: pooled, batch, published, rejection, growing or noise",
    ),
    flags.DEFINE_integer(
        "num_candidates",
        None,
        "draws per chunk of the samplers batch and published; pooled (1/T not a whole number) and rejection reserve up to so "
        "many of max_draws, at most half",
    ),
    flags.DEFINE_integer(
        "max_draws",
        None,
        "maximum draws per chunk of the samplers pooled, rejection and growing, and of --prompt_alignment=match",
    ),
    flags.DEFINE_integer("draws_at_once", None, "draws computed together, over all prompts"),
    flags.DEFINE_float(
        "top_p",
        None,
        "nucleus sampling, autoregressive baseline only: probability of the set of likeliest tokens to sample from",
    ),
    flags.DEFINE_float(
        "token_prior_scale",
        None,
        "multiplies the weight of the token prior, for models that have one; above 1 likelier words, and fewer different ones",
    ),
    flags.DEFINE_integer("max_tokens", None, "maximum tokens to generate for each prompt"),
    flags.DEFINE_multi_string("stop", None, "text ends before this string"),
    flags.DEFINE_string(
        "prompt_alignment",
        None,
        "how to bring a prompt to whole chunks: left (pads before it), pad (pads after it), or match (sample a last "
        "chunk that begins with the prompt's last tokens)",
    ),
    flags.DEFINE_string(
        "long_context",
        None,
        "text longer than the model's context: refuse, or slide (attend to the last chunks only)",
    ),
    flags.DEFINE_integer("batch_size", None, "prompts continued together, at most"),
)
_start_processes = startup.define_flags()

# All prompts and their continuations are held in memory, as Python objects of ten times their bytes in the file.
_MOST_PROMPTS = 1_000_000
_MOST_PROMPT_BYTES = 2**27


def _prompts() -> list[Prompt]:
    prompts: list[Prompt] = list(_PROMPT.value)
    if _PROMPTS_FILE.value:
        text = read_text(_PROMPTS_FILE.value, "--prompts_file", _MOST_PROMPT_BYTES)
        if not text:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r} is empty: an empty line is an empty prompt"
            )
        text = text.removesuffix("\n")
        count = text.count("\n") + 1
        if count > _MOST_PROMPTS:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r} has {count} prompts, and a command takes at most {_MOST_PROMPTS}: "
                "take fewer lines"
            )
        lines = text.split("\n")
        if pathlib.Path(_PROMPTS_FILE.value).suffix == ".jsonl":
            prompts += [_prompt_of(line, number) for number, line in enumerate(lines, 1)]
        else:
            prompts += [line.removesuffix("\r") for line in lines]
    if not prompts:
        raise UserError("give a --prompt=TEXT (an empty one starts a document) or a --prompts_file")
    return prompts


def _prompt_of(line: str, number: int) -> Prompt:
    """The prompt on a line of a .jsonl file. Raises `UserError` with the line number if there is none."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise UserError(
            f'--prompts_file={_PROMPTS_FILE.value!r}: line {number} is no {{"prompt": TEXT}} or {{"prompt": [TOKEN IDS]}}'
        )
    return prompt


def _options(config: Config) -> SampleConfig:
    """The `sample` section of the model's config with the given flags. Raises `UserError` for a flag that does not fit it."""
    from calm_jax.sampling.config import CALM_ONLY

    given: dict[str, Any] = {flag.name: flag.value for flag in _OPTIONS if flag.value is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    useless = [name for name in given if name in CALM_ONLY]
    if useless and not config.has_autoencoder:
        raise UserError(
            f"--{useless[0]}={given[useless[0]]} has no meaning for lm.head.name='softmax', which samples tokens from "
            "their probabilities: leave it out"
        )
    try:
        # A config checks that its options suit its head.
        return dataclasses.replace(
            config, sample=dataclasses.replace(config.sample, **given)
        ).sample
    except UserError as error:
        # The message begins with the key's name, as in "sample.temperature=2" or "max_tokens=0".
        message = str(error).removeprefix("sample.")
        if message.partition("=")[0] not in given:
            raise
        raise UserError(f"--{message}") from error


def _as_text(prompt: Prompt, generator: Generator) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(prompt)


def _print(generator: Generator, prompts: Sequence[Prompt], options: SampleConfig) -> None:
    """Prints texts in the order of the prompts: a single text piece by piece, more texts each when it is complete."""
    from calm_jax.parallel import multihost

    done: list[Continuation] = []
    if len(prompts) == 1:
        # `generate` refuses wrong prompts and options here, before anything is printed.
        pieces = generator.generate(prompts, options, _SEED.value, stream=True)
        print(_as_text(prompts[0], generator), end="", flush=True)
        try:
            for piece in pieces:
                print(piece.text, end="", flush=True)
                done = [piece.continuation]
        finally:
            # Also before the line that says what has interrupted it.
            print("\n", flush=True)
    else:
        waiting: dict[int, Continuation] = {}
        for one in generator.finish_each(prompts, options, _SEED.value):
            waiting[one.index] = one
            while len(done) in waiting:
                done.append(waiting.pop(len(done)))
                print(f"{_as_text(done[-1].prompt, generator)}{done[-1].text}\n", flush=True)
    if multihost.is_primary():
        print(generator.describe(done, options), file=sys.stderr)


def _write(
    generator: Generator, prompts: Sequence[Prompt], options: SampleConfig, path: pathlib.Path
) -> None:
    """Writes one JSON object for each prompt, in order. The file appears when it is complete."""
    from calm_jax.parallel import multihost
    from calm_jax.run.continuation import as_line

    done: list[Continuation] = []
    with progress.Countdown("generating", len(prompts), "prompts", multihost.is_primary()) as left:
        for one in generator.finish_each(prompts, options, _SEED.value):
            done.append(one)
            left.done(len(done))
    done.sort(key=lambda one: one.index)
    lines = "".join(map(as_line, done))
    multihost.write_once(lambda: write_result(path, lines))
    print(f"{path}: {progress.counted(len(done), 'text')}; {generator.describe(done, options)}")


@multihost_command
def main(argv: list[str]) -> None:
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.parallel import multihost
    from calm_jax.run.generator import Generator
    from calm_jax.run.workdir import Workdir

    workdir = given_folder(_WORKDIR, "the folder of a trained model")
    require_seed("--seed", _SEED.value)
    output = local_path(_OUTPUT.value, "--output")
    if _OUTPUT.value:
        output = new_file(output, "--output", _OVERWRITE.value)
    else:
        tell_of_no_files()
    prompts = _prompts()
    _start_processes()
    set_up_compiler()
    given = {flag.name: flag.value for flag in (*_OPTIONS, _SEED, _WORKDIR, _OUTPUT)}
    multihost.check_same(lambda: given | {"prompts": prompts})
    with multihost.entered_once(owned_output(_OUTPUT, _OVERWRITE.value)):
        # Wrong flags are refused before the parameters are read.
        options = multihost.run_on_all(lambda: _options(Workdir(workdir).config))
        generator = Generator.load(workdir)
        if _OUTPUT.value:
            _write(generator, prompts, options, output)
        else:
            _print(generator, prompts, options)


if __name__ == "__main__":
    keep_freed_memory()
    app.run(main, flags_parser=parse_flags)
