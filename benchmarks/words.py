"""How much of the text that a model writes is made of words and strings of its training text.

    python -m benchmarks.words --workdir=runs/quickstart [--temperature=1 --temperature=0.33] [--texts=96] [--max_tokens=128]

The prompts are the recipe's, in turn, and the sampler is the run's. A word has three letters or more, and counts if it is in at
least two training documents. Strings are of eight characters, and those that are mostly white space are left out. Held-out text
stands beside them. Both shares grow if a model writes only its most frequent words, so the table has the number of
different words and the share of white space, too.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

import numpy as np
import rich.table
from absl import app, flags

from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.run.dataset import read_corpus
from calm_jax.run.generator import Generator
from calm_jax.run.workdir import Workdir

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_TEMPERATURES = flags.DEFINE_multi_float(
    "temperature", [], "a temperature, may be repeated; that of the run if there is none"
)
_TEXTS = flags.DEFINE_integer("texts", 96, "texts for each temperature", lower_bound=2)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "new tokens of a text", lower_bound=1)

_LENGTH = 8
_WORD = re.compile(r"[^\W\d_]{3,}")


def words(text: str) -> list[str]:
    """Runs of three letters or more."""
    return _WORD.findall(text)


def strings(text: str) -> Iterator[str]:
    """All strings of eight characters, at least four of which are not white space."""
    for start in range(len(text) - _LENGTH + 1):
        string = text[start : start + _LENGTH]
        if sum(map(str.isspace, string)) <= _LENGTH // 2:
            yield string


class Known:
    """The words that are in at least two of some documents, and all of the documents' strings."""

    def __init__(self, documents: Sequence[str]):
        count = collections.Counter(word for text in documents for word in set(words(text)))
        self.words = {word for word, number in count.items() if number > 1}
        self.strings = {string for text in documents for string in strings(text)}

    def row(self, texts: Sequence[str]) -> list[str]:
        """Cells of the table: both shares, with errors over the texts; different words; the share of white space."""
        is_word = [[word in self.words for word in words(text)] for text in texts]
        is_string = [[string in self.strings for string in strings(text)] for text in texts]
        different = {word for text in texts for word in words(text)} & self.words
        characters = "".join(texts)
        space = sum(map(str.isspace, characters)) / max(1, len(characters))
        return [_share(is_word), _share(is_string), str(len(different)), f"{space:.0%}"]


def _share(is_known: Sequence[Sequence[bool]]) -> str:
    """The share of True, with its standard error over independent texts (that of a ratio)."""
    numbers, known = np.array([(len(one), sum(one)) for one in is_known], float).T
    if not numbers.sum():
        return "none"
    share = known.sum() / numbers.sum()
    if len(numbers) == 1:
        return f"{share:.3f}"
    residuals = known - share * numbers
    error = np.sqrt(len(numbers) / (len(numbers) - 1) * (residuals**2).sum()) / numbers.sum()
    return f"{share:.3f} ± {error:.3f}"


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_WORKDIR, "the folder of a trained model")
    generator, config = Generator.load(str(folder)), Workdir(folder).config
    options = dataclasses.replace(
        generator.options, max_tokens=_MAX_TOKENS.value, batch_size=_TEXTS.value
    )
    ways = [dataclasses.replace(options, temperature=one) for one in _TEMPERATURES.value]
    corpus = read_corpus(config, ("lm",))
    known = Known([document.text for document in corpus.train])
    prompts = [options.prompts[i % len(options.prompts)] for i in range(_TEXTS.value)]
    table = rich.table.Table(title=f"{_TEXTS.value} texts of {_MAX_TOKENS.value} tokens")
    for column in ("text", "words", "strings", "different words", "white space"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for way in ways or [options]:
        done = generator.generate(prompts, way)
        name = generator.describe(done, way)
        table.add_row(name, *known.row([one.text for one in done]))
    # As long as the texts that the model writes.
    length = max(1, round(np.mean([len(one.text) for one in done])))
    held_out = [document.text[:length] for document in corpus.validation]
    table.add_row("held out", *known.row(held_out))
    progress.console().print(table, highlight=False)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
