"""The README.md (model card) of an exported model: the facts in the workdir, and headings for its author to complete."""

import math

from calm_jax.cli.progress import counted
from calm_jax.config import Config
from calm_jax.interop.published import not_carried_over
from calm_jax.run import report
from calm_jax.run.run_files import STAGES, RunFiles
from calm_jax.run.workdir import Workdir, size_of
from calm_jax.training import checkpoint_files

_HEADS = {
    "energy": "energy head",
    "diffusion": "diffusion head",
    "flow": "flow-matching head",
    "softmax": "softmax head, the autoregressive baseline",
}


def _about(config: Config, has_lm: bool) -> str:
    chunk = f"chunks of K = {config.chunk_size} tokens"
    if not has_lm:
        return f"the autoencoder of a CALM: it compresses {chunk} into one vector each, and reconstructs them"
    head = _HEADS.get(config.lm.head.name, f"{config.lm.head.name} head")
    if not config.has_autoencoder:
        return f"a transformer that predicts tokens ({head})"
    return (
        f"a CALM, a Continuous Autoregressive Language Model: it predicts the vector of the next chunk ({chunk}, {head}), and "
        "an autoencoder turns vectors into tokens"
    )


def _training(config: Config, run: RunFiles) -> list[str]:
    """Steps, tokens and text of the stages that were trained in the workdir."""
    lines = []
    workdir = run.workdir
    for stage, title in STAGES.items():
        steps = checkpoint_files.latest_step(workdir.checkpoints(stage))
        if steps and not (stage == "autoencoder" and config.autoencoder_source):
            rows, tokens = getattr(config, stage).training.batch_size, run.tokens_per_step[stage]
            number = "" if math.isnan(tokens) else f", {steps * tokens:,.0f} tokens in all"
            lines.append(
                f"* {title.lower()}: {counted(steps, 'step')} of {counted(rows, 'block')}{number}"
            )
    texts = workdir.stored_corpus().items()
    return [*lines, *(f"* text ({name}): {size_of(text)}" for name, text in texts)]


def _scores(config: Config, run: RunFiles) -> list[str]:
    results = run.of_training()
    if config.lm.token_prior_weight:
        # Without the token prior, which is not exported, the language model has lower scores than the run.
        results = {name: values for name, values in results.items() if name == "autoencoder"}
    rows = report.rows(results, config, run.workdir)
    if not rows:
        return []
    return ["| | |", "|---|---|", *(f"| {name.strip()} | {value} |" for name, value in rows)]


def model_card(workdir: Workdir, has_lm: bool, num_parameters: int, repository: str) -> str:
    """The card as Markdown.

    Args:
      workdir: the workdir of the exported model.
      has_lm: whether the language model is in it, or the autoencoder alone.
      num_parameters: the number of exported parameters.
      repository: the name of the exported folder.
    """
    config = workdir.config
    tokenizer = workdir.tokenizer
    parts = [
        "---",
        "library_name: calm_jax",
        *(["pipeline_tag: text-generation"] if has_lm else []),
        "tags: [calm]",
        "# license: ",
        "# language: ",
        "---",
        "",
        f"# {repository}",
        "",
        f"This is {_about(config, has_lm)}. It has {num_parameters:,} parameters and a vocabulary of "
        f"{tokenizer.vocab_size:,} tokens ({tokenizer.kind}).",
        "",
        "<!-- What the model is for, who made it, and under which licence. -->",
        "",
        "## Use",
        "",
        "```bash",
        f"python -m calm_jax.interop.convert --source={repository} --workdir=runs/{repository}"
        + (" --tokenizer=bytes" if tokenizer.kind == "bytes" else ""),
    ]
    if has_lm:
        parts.append(f"python -m calm_jax.generate --workdir=runs/{repository} --prompt=TEXT")
    parts += ["```", "", "The weights are in the layout of the published PyTorch code."]
    if not workdir.is_converted:
        run = RunFiles(workdir)
        scores = _scores(config, run)
        parts += ["", "## Training", "", *_training(config, run)]
        parts += ["", "<!-- What the text is, and where it comes from. -->"]
        if scores:
            parts += ["", "## Scores on held-out text", "", *scores]
    parts += ["", "## Limits", ""]
    if has_lm:
        parts += [f"* {note}" for note in not_carried_over(config)]
    parts += [
        "<!-- What the model should not be used for; what its text lacks; whether it was tested for harmful text. -->",
        "",
    ]
    return "\n".join(parts)
