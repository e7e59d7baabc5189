"""Text in, text out.

python -m calm_jax.generate --workdir=runs/quickstart --prompt='def main(' --temperature=0.5 --max_tokens=128

One prompt is shown as it is written; of several, each when it is complete. --output=FILE.jsonl writes an object a
prompt instead: prompt, text, tokens, where chunks end, draws, times (see `calm_jax.text.Continuation`).
"""

import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from calm_jax import processes, startup
from calm_jax.atomic import write_atomically
from calm_jax.command import command, parse_flags
from calm_jax.errors import UserError
from calm_jax.generation import SampleConfig
from calm_jax.text import Continuation, Generator, Prompt

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given more than once")
_PROMPTS_FILE = flags.DEFINE_string(
    "prompts_file", "", 'file with one prompt a line; in a .jsonl file {"prompt": TEXT or [IDS]}'
)
_OUTPUT = flags.DEFINE_string("output", "", "file to write, one JSON object a prompt")
_OVERWRITE = flags.DEFINE_bool("overwrite", False, "replace the output file")
_SEED = flags.DEFINE_integer("seed", 0, "decides every random number")
# What is not given is as in the workdir's config; configs/common.py describes each under `sample`.
_OPTIONS = (
    flags.DEFINE_float(
        "temperature", None, "in (0, 1]; with a softmax head any from 0 (the likeliest token) on"
    ),
    flags.DEFINE_string("sampler", None, "pooled, batch, published, rejection, growing or noise"),
    flags.DEFINE_integer("num_candidates", None, "candidates per chunk of batch and published"),
    flags.DEFINE_integer("max_draws", None, "most draws per chunk of the other samplers"),
    flags.DEFINE_integer("draws_at_once", None, "draws computed together"),
    flags.DEFINE_float(
        "top_p", None, "with a softmax head: only the likeliest tokens of this probability together"
    ),
    flags.DEFINE_integer("max_tokens", None, "tokens to generate for each prompt"),
    flags.DEFINE_multi_string("stop", None, "string that ends a text; may be given more than once"),
    flags.DEFINE_string("prompt_alignment", None, "left, match or pad"),
    flags.DEFINE_string("long_context", None, "refuse or slide"),
    flags.DEFINE_integer("batch_size", None, "prompts generated together"),
)
_start_processes = startup.define_flags()
# Options that a model with probabilities has no use for.
_OF_LATENT_HEADS = ("sampler", "num_candidates", "max_draws", "draws_at_once", "prompt_alignment")


def _prompts() -> list[Prompt]:
    prompts: list[Prompt] = list(_PROMPT.value)
    if _PROMPTS_FILE.value:
        path = pathlib.Path(_PROMPTS_FILE.value)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r}: byte {error.start} is not valid UTF-8"
            ) from error
        lines = text.removesuffix("\n").split("\n")
        if path.suffix == ".jsonl":
            prompts += [_prompt_of(line, number) for number, line in enumerate(lines, 1)]
        else:
            prompts += lines
    if not prompts:
        raise UserError("give a --prompt=TEXT (an empty one starts a document) or a --prompts_file")
    return prompts


def _prompt_of(line: str, number: int) -> Prompt:
    """The prompt of a line of JSON."""
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise UserError(
            f'--prompts_file={_PROMPTS_FILE.value!r}: line {number} is no {{"prompt": TEXT}} or {{"prompt": [IDS]}}'
        )
    return prompt


def _options(generator: Generator) -> SampleConfig:
    given = {flag.name: flag.value for flag in _OPTIONS if flag.value is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    useless = [name for name in given if name in _OF_LATENT_HEADS]
    if useless and not generator.has_autoencoder:
        raise UserError(
            f"--{useless[0]}={given[useless[0]]} has no meaning for lm.head.name='softmax', whose probabilities are "
            "known: leave it out"
        )
    return dataclasses.replace(generator.options, **given)


def _shown(prompt: Prompt, generator: Generator) -> str:
    return prompt if isinstance(prompt, str) else generator.tokenizer.decode(prompt)


def _print(generator: Generator, prompts: Sequence[Prompt], options: SampleConfig) -> None:
    """Writes texts to the terminal: one as it comes, several each when it is complete, in order."""
    waiting: dict[int, Continuation] = {}
    done: list[Continuation] = []
    pieces = generator.generate(prompts, options, _SEED.value, stream=True)
    if len(prompts) == 1:
        print(_shown(prompts[0], generator), end="", flush=True)
    for piece in pieces:
        one = piece.continuation
        if len(prompts) == 1:
            print(piece.text, end="", flush=True)
        if one.finish:
            waiting[one.index] = one
        while len(done) in waiting:
            one = waiting.pop(len(done))
            text = "" if len(prompts) == 1 else f"{_shown(one.prompt, generator)}{one.text}"
            print(f"{text}\n", flush=True)
            done.append(one)
    if processes.is_first():
        print(generator.describe(done, options), file=sys.stderr)


def _write(
    generator: Generator, prompts: Sequence[Prompt], options: SampleConfig, path: pathlib.Path
) -> None:
    """Writes an object a prompt, in order; the file appears when it is whole."""
    done: list[Continuation] = []
    for piece in generator.generate(prompts, options, _SEED.value, stream=True):
        if piece.continuation.finish:
            done.append(piece.continuation)
            if processes.is_first():
                shown = f"\r{len(done)} of {len(prompts)} prompts"
                print(shown, end="", file=sys.stderr, flush=True)
    if processes.is_first():
        print(file=sys.stderr)
    done.sort(key=lambda one: one.index)
    lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in done]
    processes.write(lambda: write_atomically(path, "".join(lines)))
    print(f"{path}: {len(done)} texts; {generator.describe(done, options)}")


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; a prompt goes into --prompt=TEXT")
    if not _WORKDIR.value:
        raise UserError("give the folder of a trained model: --workdir=DIR")
    if not 0 <= _SEED.value < 2**32:
        raise UserError(f"--seed={_SEED.value} must be in [0, 2**32)")
    output = pathlib.Path(_OUTPUT.value)
    if _OUTPUT.value:
        if output.exists() and not output.is_file():
            raise UserError(f"--output={output} is no file")
        if output.exists() and not _OVERWRITE.value:
            raise UserError(
                f"--output={output} is there already: give another name, or --overwrite"
            )
        output = output.resolve()
        if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
            raise UserError(f"--output={output} cannot be written: no such folder, or no right to")
    prompts = _prompts()
    _start_processes()
    given = {flag.name: flag.value for flag in (*_OPTIONS, _SEED, _WORKDIR, _OUTPUT)}
    processes.check_same(lambda: given | {"prompts": prompts})
    generator = Generator.load(_WORKDIR.value)
    options = _options(generator)
    if _OUTPUT.value:
        _write(generator, prompts, options, output)
    else:
        _print(generator, prompts, options)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
