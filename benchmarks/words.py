"""How much of the text that a model writes is made of words and strings of its training text.

    python -m benchmarks.words --workdir=runs/quickstart [--temperature=1 --temperature=0.33] [--texts=96] [--max_tokens=128]

The prompts are the recipe's, in turn, and the sampler is the run's unless --sampler is given. A word has three letters or more,
and counts if it is in at least two training documents. Strings are of eight characters, and those that are mostly white space
are left out. As many pieces of held-out text, which are as long, stand beside them. Both shares grow if a model writes only its
most frequent words, so the table has the number of different words and the share of white space, too.
"""

import dataclasses

import numpy as np
import rich.table
from absl import app, flags

from benchmarks.known_text import KnownText
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError
from calm_jax.run.dataset import read_corpus
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_TEMPERATURES = flags.DEFINE_multi_float(
    "temperature", [], "a temperature, may be repeated; that of the run if there is none"
)
_SAMPLER = flags.DEFINE_string(
    "sampler", "", "sampler below temperature 1; that of the run if empty"
)
_TEXTS = flags.DEFINE_integer("texts", 96, "texts for each temperature", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "new tokens of a text", lower_bound=1)


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_WORKDIR, "the folder of a trained model")
    config = Workdir(folder).config
    corpus = read_corpus(config, ("lm",))
    documents = [document.text for document in corpus.train]
    if config.data.prompt_field or corpus.prepared or len(documents) < 2:
        raise UserError(
            f"--workdir={folder}: its training text must be two documents or more, without prompts and not prepared"
        )
    generator = Generator.load(str(folder))
    options = dataclasses.replace(
        generator.options, max_tokens=_MAX_TOKENS.value, batch_size=_TEXTS.value
    )
    if _SAMPLER.value:
        options = dataclasses.replace(options, sampler=_SAMPLER.value)
    ways = [dataclasses.replace(options, temperature=one) for one in _TEMPERATURES.value]
    known = KnownText(documents)
    # Without prompts, as after fine-tuning on records: the start of a document.
    given = options.prompts or ("",)
    prompts = [given[i % len(given)] for i in range(_TEXTS.value)]
    table = rich.table.Table(title=f"{_TEXTS.value} texts of {_MAX_TOKENS.value} tokens")
    for column in ("text", "words", "strings", "different words", "white space"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for way in ways or [options]:
        done = generator.generate(prompts, way)
        name = generator.describe(done, way)
        table.add_row(name, *known.row([one.text for one in done]))
    length = max(1, round(np.mean([len(one.text) for one in done])))
    held_out = "".join(document.text for document in corpus.validation)
    starts = np.linspace(0, max(0, len(held_out) - length), _TEXTS.value, dtype=int)
    table.add_row("held out", *known.row([held_out[start:][:length] for start in starts]))
    progress.console().print(table, highlight=False)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
