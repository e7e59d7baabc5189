"""BrierLM of several systems at the same positions in a text: the work of `python -m calm_jax.brierlm`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

import rich.table
import rich.text

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.cli import progress
from calm_jax.cli.files import local_path
from calm_jax.cli.output import write_result
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer, open_tokenizer
from calm_jax.errors import UserError
from calm_jax.evaluation.causal_lm import CausalLM
from calm_jax.evaluation.samples import (
    Reference,
    Sample,
    Scorer,
    read_references,
    read_samples,
)
from calm_jax.run import preflight
from calm_jax.run.dataset import Dataset
from calm_jax.run.generator import Generator
from calm_jax.run.references import have_tokens_of, samples_of
from calm_jax.run.references import references as references_of
from calm_jax.run.report import brier_columns
from calm_jax.run.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class ScoredRun:
    """A run whose text is scored, as --mode=eval would score it.

    Attributes:
        config: the stored config, with the keys that the command changes.
        workdir: the run's folder.
    """

    config: Config
    workdir: Workdir

    def __post_init__(self):
        preflight.check_scored(self.config, self.workdir)

    def text(self) -> Dataset:
        """The run's text, read and tokenised."""
        return preflight.read_scored(self.config, self.workdir, ("lm",))[0]


def write_references(run: ScoredRun, most: int, path: pathlib.Path) -> None:
    """Writes the positions of a run's equal-context evaluation, evenly spaced; `most`: how many at most, 0 for all."""
    config = run.config
    given, number = references_of(config, run.text(), run.workdir.tokenizer, most)
    lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in given]
    write_result(path, "".join(lines))
    print(
        f"{path}: {len(given):,} of {number:,} positions, each after {config.eval.context_tokens} to "
        f"{config.eval.block_tokens} tokens of context"
    )


def score(
    references_file: str,
    samples_files: Sequence[str],
    models: Sequence[str],
    run: ScoredRun | None,
    tokenizer_name: str,
    num_samples: int,
    seed: int,
    output: pathlib.Path | None,
) -> None:
    """Scores samples in files and samples of models, and prints a table.

    Args:
        references_file: the positions, as `write_references` writes them.
        samples_files: samples of systems, one file for each.
        models: workdirs and "hf:NAME", which are sampled.
        run: gives the tokenizer and the frequency floor; None: there is no floor.
        tokenizer_name: the tokenizer of texts (`open_tokenizer`); empty: the run's, if any.
        num_samples, seed: of the models' samples.
        output: where the samples of the one model are written; None: nowhere.

    Raises:
        UserError: for bad files, flags, tokenizers and Hugging Face models, before anything is sampled; for a workdir whose checkpoint is
            damaged, when its turn comes.
    """
    references = read_references(references_file)
    places = list(references.values())
    drawn = {path: read_samples(path, references) for path in samples_files}
    tokenizer = open_tokenizer(tokenizer_name)[0] if tokenizer_name else None
    if run is not None:
        _check_one_tokenizer(run.workdir.tokenizer, tokenizer, tokenizer_name, places)
        tokenizer = run.workdir.tokenizer
    are_texts = {path: isinstance(samples[places[0].id][0], str) for path, samples in drawn.items()}
    texts = [name for name, is_text in are_texts.items() if is_text]
    texts += [name for name in models if _gives_text(name, places)]
    for path, is_text in are_texts.items():
        if texts and not is_text:
            raise UserError(
                f"--samples={path} holds tokens, and {texts[0]} gives texts, which are scored in another way: score them "
                "one after the other"
            )
    scorer = Scorer(references, tokenizer)
    # Raises an error before anything is sampled, if a reference lacks its text or its tokens.
    scorer.targets(bool(texts))
    loaded = {
        name: CausalLM(name.removeprefix("hf:"), seed) for name in models if name.startswith("hf:")
    }
    floor = {}
    if run is not None and (text := run.text()).has_train:
        floor["frequencies (the floor)"] = scorer.floor(text.training_ngrams(), bool(texts))
    for name in models:
        drawn[name] = _draw(name, loaded.get(name), places, bool(texts), num_samples, seed)
        if output is not None:
            lines = [
                json.dumps({"id": id, "samples": several}) + "\n"
                for id, several in drawn[name].items()
            ]
            write_result(output, "".join(lines))
    scores = {name: scorer.score(samples) for name, samples in drawn.items()}
    _print(scores | floor, len(references))


def _check_one_tokenizer(
    ours: Tokenizer, given: Tokenizer | None, given_name: str, references: Sequence[Reference]
) -> None:
    """Raises `UserError` if --tokenizer or a reference has another tokenizer than --config's run, in whose tokens the floor is."""
    way_out = "leave --config out, and with it the floor"
    if given is not None and given.fingerprint != ours.fingerprint:
        raise UserError(
            f"--tokenizer={given_name} is not the tokenizer of --config's run: leave it out, or {way_out}"
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
        return True
    workdir = Workdir(local_path(name, "--model"))
    if not workdir.exists:
        raise UserError(
            f"--model={name} is no workdir: the name of a Hugging Face model begins with hf: (hf:{name})"
        )
    if not workdir.has_lm:
        raise UserError(f"--model={name} has no trained language model")
    return not have_tokens_of(workdir.tokenizer, references)


def _draw(
    name: str,
    loaded: CausalLM | None,
    references: Sequence[Reference],
    as_text: bool,
    num_samples: int,
    seed: int,
) -> dict[str, list[Sample]]:
    """Samples of a model at every reference: of `loaded`, or else of the workdir `name`."""
    with progress.Countdown(f"{name}: sampling", len(references), "positions") as countdown:
        if loaded is not None:
            contexts = [reference.context for reference in references]
            texts = loaded.sample(contexts, num_samples, countdown.done)
            drawn: list[list[Sample]] = [list(several) for several in texts]
        else:
            drawn = samples_of(
                Generator.load(name),
                references,
                as_text,
                num_samples,
                seed,
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
