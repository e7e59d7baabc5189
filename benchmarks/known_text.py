"""Words and strings of some documents, and how much of another text is made of them."""

import collections
import re
from collections.abc import Iterator, Sequence

import numpy as np

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


class KnownText:
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
