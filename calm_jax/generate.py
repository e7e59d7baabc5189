"""Text in, text out.

python -m calm_jax.generate --workdir=runs/quickstart --prompt='def main(' --temperature=0.5 --max_tokens=128
"""

import dataclasses
import pathlib

import jax
from absl import app, flags

from calm_jax.command import command
from calm_jax.errors import UserError
from calm_jax.mesh import make_mesh
from calm_jax.text import continuations
from calm_jax.workdir import Workdir, make_autoencoder_task, make_lm_task

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "text to continue; may be given more than once")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", "", "file with one prompt a line")
# What is not given is as in the workdir's config.
_TEMPERATURE = flags.DEFINE_float(
    "temperature", None, "in (0, 1]; with a softmax head any from 0 (the likeliest token) on"
)
_TOP_P = flags.DEFINE_float(
    "top_p", None, "with a softmax head: only the likeliest tokens of this probability together"
)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", None, "tokens to generate for each prompt")
_NUM_CANDIDATES = flags.DEFINE_integer(
    "num_candidates",
    None,
    "candidates per chunk; not used at temperature 1, nor with a softmax head",
)
_SEED = flags.DEFINE_integer("seed", 0, "decides every random number")


def _prompts() -> list[str]:
    prompts = list(_PROMPT.value)
    if _PROMPTS_FILE.value:
        try:
            text = pathlib.Path(_PROMPTS_FILE.value).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"--prompts_file={_PROMPTS_FILE.value!r}: byte {error.start} is not valid UTF-8"
            ) from error
        prompts += text.removesuffix("\n").split("\n")
    if not prompts:
        raise UserError("give a --prompt=TEXT (an empty one starts a document) or a --prompts_file")
    return prompts


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; a prompt goes into --prompt=TEXT")
    if not _WORKDIR.value:
        raise UserError("give the folder of a trained model: --workdir=DIR")
    if not 0 <= _SEED.value < 2**32:
        raise UserError(f"--seed={_SEED.value} must be in [0, 2**32)")
    prompts = _prompts()
    workdir = Workdir(pathlib.Path(_WORKDIR.value))
    config = workdir.config
    options = {
        flag.name: flag.value for flag in (_TEMPERATURE, _TOP_P, _MAX_TOKENS, _NUM_CANDIDATES)
    }
    given = {name: value for name, value in options.items() if value is not None}
    config = dataclasses.replace(config, sample=dataclasses.replace(config.sample, **given))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        task = make_lm_task(config, workdir.tokenizer, config.eval.published)
        params = workdir.load_params("lm", task, mesh)
        frozen = {}
        if config.has_autoencoder:
            autoencoder = make_autoencoder_task(config, workdir.tokenizer)
            frozen = {"params": workdir.load_params("autoencoder", autoencoder, mesh)}
        texts = continuations(
            task, params, frozen, workdir.tokenizer, prompts, config.sample, _SEED.value
        )
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt}{text}\n")


if __name__ == "__main__":
    app.run(main)
