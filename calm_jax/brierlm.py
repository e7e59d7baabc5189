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

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import rich.table
import rich.text
from absl import app, flags

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import define_recipe, parse_flags
from calm_jax.cli.output import owned_output, write_result
from calm_jax.config import Config, resolve
from calm_jax.data.tokenizers import Tokenizer, open_tokenizer
from calm_jax.errors import UserError
from calm_jax.evaluation.causal_lm import CausalLM, check_installed
from calm_jax.evaluation.samples import (
    Reference,
    Sample,
    Scorer,
    read_references,
    read_samples,
)
from calm_jax.parallel.compilation_cache import set_up_compiler
from calm_jax.parallel.host_memory import keep_freed_memory
from calm_jax.run import preflight
from calm_jax.run.generator import Generator
from calm_jax.run.references import have_tokens_of, samples_of
from calm_jax.run.references import references as references_of
from calm_jax.run.report import brier_columns
from calm_jax.run.workdir import Workdir

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


def _write(config: Config, workdir: Workdir, path: pathlib.Path) -> None:
    preflight.check_scored(config, workdir)
    text, _ = preflight.read_scored(config, workdir)
    given, number = references_of(config, text, workdir.tokenizer, _POSITIONS.value)
    lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in given]
    write_result(path, "".join(lines))
    print(
        f"{path}: {len(given):,} of {number:,} positions, each after {config.eval.context_tokens} to "
        f"{config.eval.block_tokens} tokens of context"
    )


def _check_one_tokenizer(
    ours: Tokenizer, given: Tokenizer | None, references: Sequence[Reference]
) -> None:
    """Raises `UserError` if --tokenizer or a reference has another tokenizer than --config's run, in whose tokens the floor is."""
    way_out = "leave --config out, and with it the floor"
    if given is not None and given.fingerprint != ours.fingerprint:
        raise UserError(
            f"--tokenizer={_TOKENIZER.value} is not the tokenizer of --config's run: leave it out, or {way_out}"
        )
    for one in references:
        if one.tokenizer not in ("", ours.fingerprint):
            raise UserError(
                f"the reference {one.id!r} was made with tokenizer {one.tokenizer}, and --config's run has "
                f"{ours.fingerprint}: {way_out}"
            )


def _gives_text(name: str, references: Sequence[Reference]) -> bool:
    """Whether a --model can only give texts, because the references lack tokens of its tokenizer.

    Raises `UserError` for a model that cannot be sampled.
    """
    if name.startswith("hf:"):
        check_installed(name)
        return True
    workdir = Workdir(local_path(name, "--model"))
    if not workdir.exists:
        raise UserError(
            f"--model={name} is no workdir: the name of a Hugging Face model begins with hf: (hf:{name})"
        )
    if not workdir.has_lm:
        raise UserError(f"--model={name} has no trained language model")
    return not have_tokens_of(workdir.tokenizer, references)


def _draw(name: str, references: Sequence[Reference], as_text: bool) -> dict[str, list[Sample]]:
    """Samples of a model at every reference."""
    with progress.Countdown(f"{name}: sampling", len(references), "positions") as countdown:
        if name.startswith("hf:"):
            model = CausalLM(name.removeprefix("hf:"), _SEED.value)
            contexts = [reference.context for reference in references]
            texts = model.sample(contexts, _NUM_SAMPLES.value, countdown.done)
            drawn: list[list[Sample]] = [list(several) for several in texts]
        else:
            drawn = samples_of(
                Generator.load(name),
                references,
                as_text,
                _NUM_SAMPLES.value,
                _SEED.value,
                countdown.done,
            )
    return {one.id: several for one, several in zip(references, drawn, strict=True)}


def _print(scores: Mapping[str, brier.Score], num_positions: int) -> None:
    table = rich.table.Table(title=f"BrierLM over {num_positions:,} positions")
    for column in ("system", "BrierLM", *(f"100 x Brier-{n}" for n in range(1, ORDERS + 1))):
        table.add_column(column, justify="left" if column == "system" else "right")
    for name, score in scores.items():
        table.add_row(rich.text.Text(name), *brier_columns(brier.as_values(score)))
    progress.console().print(table, highlight=False)


@command
def main(argv: list[str]) -> None:
    overwrite = _OVERWRITE.value
    with owned_output(_WRITE, overwrite) as written, owned_output(_OUTPUT, overwrite) as output:
        _run(written, output)


def _run(written: pathlib.Path | None, output: pathlib.Path | None) -> None:
    """Writes the references to `written`, or scores systems and writes the samples of one to `output`."""
    config = None if _CONFIG.value is None else resolve(_CONFIG.value)
    set_up_compiler()
    if written is not None:
        if config is None:
            raise UserError("--write_references needs a run: --config=configs/workdir.py:DIR")
        of_scoring = (_REFERENCES, _SAMPLES, _MODEL, _OUTPUT, _TOKENIZER)
        _refuse("with --write_references", *of_scoring, *_OF_MODELS)
        _write(config, Workdir(_folder()), written)
        return
    if not _REFERENCES.value or not (_SAMPLES.value or _MODEL.value):
        raise UserError("give --references=FILE, and --samples=FILE or --model=NAME")
    if _OUTPUT.value and len(_MODEL.value) != 1:
        raise UserError(f"--output={_OUTPUT.value} is for the samples of one --model")
    _refuse("without --write_references", _POSITIONS)
    if not _MODEL.value:
        _refuse("without --model", *_OF_MODELS)
    references = read_references(_REFERENCES.value)
    places = list(references.values())
    drawn = {path: read_samples(path, references) for path in _SAMPLES.value}
    tokenizer = open_tokenizer(_TOKENIZER.value)[0] if _TOKENIZER.value else None
    if config is not None:
        workdir = Workdir(_folder())
        preflight.check_scored(config, workdir)
        _check_one_tokenizer(workdir.tokenizer, tokenizer, places)
        tokenizer = workdir.tokenizer
    are_texts = {path: isinstance(samples[places[0].id][0], str) for path, samples in drawn.items()}
    texts = [name for name, is_text in are_texts.items() if is_text]
    texts += [name for name in _MODEL.value if _gives_text(name, places)]
    for path, is_text in are_texts.items():
        if texts and not is_text:
            raise UserError(
                f"--samples={path} holds tokens, and {texts[0]} gives texts, which are scored in another way: score them "
                "one after the other"
            )
    scorer = Scorer(references, tokenizer)
    # Raises an error before anything is sampled, if a reference lacks its text or its tokens.
    scorer.targets(bool(texts))
    floor = {}
    if config is not None:
        text, _ = preflight.read_scored(config, workdir)
        if text.has_train:
            floor["frequencies (the floor)"] = scorer.floor(text.training_ngrams(), bool(texts))
    for name in _MODEL.value:
        drawn[name] = _draw(name, places, bool(texts))
        if output is not None:
            lines = [
                json.dumps({"id": id, "samples": several}) + "\n"
                for id, several in drawn[name].items()
            ]
            write_result(output, "".join(lines))
    scores = {name: scorer.score(samples) for name, samples in drawn.items()}
    _print(scores | floor, len(references))


if __name__ == "__main__":
    keep_freed_memory()
    app.run(main, flags_parser=parse_flags)
