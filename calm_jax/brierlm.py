"""BrierLM of any system that can be sampled, beside a CALM, at the same positions in the same text.

The first command writes the positions that --mode=eval scores at equal context, each with the text before and after it:

    python -m calm_jax.brierlm --config=configs/workdir.py:runs/quickstart --write_references=references.jsonl

The next two score samples that another system drew at these positions, and sample and score two models:

    python -m calm_jax.brierlm --references=references.jsonl --samples=samples.jsonl --tokenizer=runs/quickstart
    python -m calm_jax.brierlm --references=references.jsonl --model=hf:gpt2 --model=runs/quickstart \\
        --config=configs/workdir.py:runs/quickstart

With --config the frequency floor is scored, too; texts are then tokenised by that run's tokenizer, and the references must have
been made with it. If one system gives texts, as hf:gpt2 does, all systems that --model samples give texts, too, and not tokens.
`calm_jax.evaluation.samples` describes the lines of both files, docs/evaluation.md the score.
"""

import pathlib
from typing import Any

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.cli.output import owned_output
from calm_jax.errors import UserError
from calm_jax.parallel.host_memory import keep_freed_memory

_CONFIG = define_recipe("configs/workdir.py:DIR, a run whose text and tokenizer are used")
_WRITE = flags.DEFINE_string(
    "write_references",
    "",
    "write the positions of --config's equal-context evaluation to this file",
)
_POSITIONS = flags.DEFINE_integer(
    "positions", 2000, "positions to write, evenly spaced among all; 0: all", lower_bound=0
)
_REFERENCES = flags.DEFINE_string("references", "", "file of positions and their continuations")
_SAMPLES = flags.DEFINE_multi_string("samples", [], "file of samples of a system; repeatable")
_MODEL = flags.DEFINE_multi_string(
    "model",
    [],
    "system to sample: a workdir, or hf:NAME, a Hugging Face model or its folder; repeatable",
)
_NUM_SAMPLES = flags.DEFINE_integer(
    "num_samples", 2, "samples of each position by --model", lower_bound=2
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "seed of --model's samples", lower_bound=0, upper_bound=2**32 - 1
)
_OUTPUT = flags.DEFINE_string("output", "", "write the samples of one --model to this file")
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "replace the file of --output or --write_references if it exists"
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", "", "tokenizer of texts: a workdir, a tokenizer's file, or bytes"
)
_OF_MODELS = (_NUM_SAMPLES, _SEED)


def _refuse(where: str, *given: flags.FlagHolder) -> None:
    """Raises `UserError` if one of some flags is given."""
    for flag in given:
        if flag.present:
            raise UserError(f"--{flag.name} has no meaning {where}: leave it out")


def _folder() -> pathlib.Path:
    """The workdir that --config names."""
    recipe: Any = flags.FLAGS["config"]
    file, _, folder = recipe.config_filename.partition(":")
    if pathlib.Path(file).name != "workdir.py":
        raise UserError(f"--config={recipe.config_filename} must be configs/workdir.py:DIR")
    return pathlib.Path(folder)


def _check_flags() -> None:
    """Raises `UserError` for flags that are missing or contradict each other."""
    if _CONFIG.value is not None:
        _folder()
    if _WRITE.value:
        if _CONFIG.value is None:
            raise UserError("--write_references needs a run: --config=configs/workdir.py:DIR")
        of_scoring = (_REFERENCES, _SAMPLES, _MODEL, _OUTPUT, _TOKENIZER)
        _refuse("with --write_references", *of_scoring, *_OF_MODELS)
        return
    if not _REFERENCES.value or not (_SAMPLES.value or _MODEL.value):
        raise UserError("give --references=FILE, and --samples=FILE or --model=NAME")
    if _OUTPUT.value and len(_MODEL.value) != 1:
        raise UserError(f"--output={_OUTPUT.value} is for the samples of one --model")
    _refuse("without --write_references", _POSITIONS)
    if not _MODEL.value:
        _refuse("without --model", *_OF_MODELS)


@command
def main(argv: list[str]) -> None:
    overwrite = _OVERWRITE.value
    with owned_output(_WRITE, overwrite) as written, owned_output(_OUTPUT, overwrite) as output:
        _check_flags()
        # Imported here, so that --help and bad flags do not wait for JAX.
        from calm_jax.config import resolve
        from calm_jax.parallel.compilation_cache import set_up_compiler
        from calm_jax.run import systems
        from calm_jax.run.workdir import Workdir

        set_up_compiler()
        run = None
        if _CONFIG.value is not None:
            run = systems.ScoredRun(resolve(_CONFIG.value), Workdir(_folder()))
        if written is not None:
            assert run is not None  # `_check_flags`
            systems.write_references(run, _POSITIONS.value, written)
            return
        systems.score(
            _REFERENCES.value,
            _SAMPLES.value,
            _MODEL.value,
            run,
            _TOKENIZER.value,
            _NUM_SAMPLES.value,
            _SEED.value,
            output,
        )


if __name__ == "__main__":
    keep_freed_memory()
    app.run(main, flags_parser=parse_flags)
