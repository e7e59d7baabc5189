"""BrierLM of the samples of any system. Files of references and of samples hold one JSON object per line.

A reference is a place in a text, `{"id": "3:256", "block": 3, "text": TEXT, "tokens": [IDS]}`: `text`, `tokens` or both give
the true continuation after the place. Optional `context` (text) and `context_tokens` give the text before it. Places that
depend on each other, such as those of one document, have the same `block`; the standard error takes blocks as clusters.
Without `block` each place is a block of its own. A line of samples is `{"id": "3:256", "samples": [...]}`: at least two
independent continuations of the context, all texts or all lists of tokens.

R references, S samples of one of them.
"""

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from calm_jax import brier
from calm_jax.brier import ORDERS
from calm_jax.cli.files import is_unicode, read_text
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError

# These stand in place of tokens after the end of a reference, which are not scored, and after the end of a sample.
_NOTHING, _ENDED = -1, -2

# A continuation, as a system writes it.
Sample = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A place in a text, and the true continuation after it.

    Attributes:
        id: names the place in files of samples.
        block: the same for places that depend on each other.
        text: the continuation; None if it is given as tokens only. If the source goes on, it is longer than four tokens, so
            that the cut at its end changes none of the four.
        tokens: the continuation as token ids, at least the first four of them; None if it is given as text only.
        context: the text before the place.
        context_tokens: its token ids.
        tokenizer: the fingerprint of the tokenizer of `tokens` and `context_tokens`.
    """

    id: str
    block: str
    text: str | None = None
    tokens: Sequence[int] | None = None
    context: str = ""
    context_tokens: Sequence[int] = ()
    tokenizer: str = ""


def _records(path: str, flag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the location of each record of a file, for messages, and the record. Raises `UserError` for a bad line."""
    for number, line in enumerate(read_text(path, flag).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{flag}={path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(record, dict) or type(record.get("id")) not in (str, int):
            raise UserError(f'{where}: no object with a field "id", a string or a whole number')
        yield where, record


def _is_text(value: Any) -> bool:
    """Whether a value is a string of valid Unicode."""
    return isinstance(value, str) and is_unicode(value)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(id) is int and 0 <= id < 2**31 for id in value)


def read_references(path: str) -> dict[str, Reference]:
    """The references of a file, by id. Raises `UserError` for a bad line, which it names."""
    kinds = {"text": _is_text, "context": _is_text, "tokenizer": _is_text}
    kinds |= {"tokens": _are_tokens, "context_tokens": _are_tokens}
    found: dict[str, Reference] = {}
    for where, record in _records(path, "--references"):
        name = str(record["id"])
        fields = {field: record[field] for field in kinds if field in record}
        for field, value in fields.items():
            if not kinds[field](value):
                what = "a list of token ids" if kinds[field] is _are_tokens else "a string"
                raise UserError(f"{where}: field {field!r} is not {what}")
        if not fields.get("text") and not fields.get("tokens"):
            raise UserError(
                f"{where}: the continuation is missing: give a 'text' or 'tokens' that is not empty"
            )
        if name in found:
            raise UserError(f"{where}: the id {name!r} appears twice in this file")
        block = record.get("block", f"id {name}")
        if type(block) not in (str, int):
            raise UserError(f"{where}: field 'block' is not a string or a whole number")
        found[name] = Reference(name, str(block), **fields)
    if not found:
        raise UserError(f"--references={path} holds no references")
    return found


def read_samples(path: str, references: Mapping[str, Reference]) -> dict[str, list[Sample]]:
    """The samples of every reference. Raises `UserError` for a bad line, which it names, or a reference without samples."""
    found: dict[str, list[Sample]] = {}
    kind = None
    for where, record in _records(path, "--samples"):
        name, samples = str(record["id"]), record.get("samples")
        if name not in references:
            raise UserError(f"{where}: no reference has the id {name!r}")
        if name in found:
            raise UserError(f"{where}: the id {name!r} appears twice in this file")
        if not isinstance(samples, list) or len(samples) < 2:
            raise UserError(f"{where}: field 'samples' must be a list of at least two samples")
        if not (all(map(_is_text, samples)) or all(map(_are_tokens, samples))):
            raise UserError(f"{where}: the samples must be all strings, or all lists of token ids")
        kind = kind or type(samples[0])
        if type(samples[0]) is not kind:
            raise UserError(
                f"{where}: all samples of a file must be of one kind, texts or lists of token ids, and earlier lines have "
                "the other kind"
            )
        found[name] = samples
    missing = [name for name in references if name not in found]
    if missing:
        raise UserError(
            f"--samples={path} has no samples of {len(missing)} of {len(references)} references, the first with the id "
            f"{missing[0]!r}"
        )
    return found


class Scorer:
    """Scores systems on the same references.

    Args:
        references: by id.
        tokenizer: tokenises texts; None if references and samples are tokens.
    """

    def __init__(self, references: Mapping[str, Reference], tokenizer: Tokenizer | None):
        self._references, self._tokenizer = references, tokenizer
        names = [reference.block for reference in references.values()]
        _, self._block_R = np.unique(np.array(names), return_inverse=True)

    def score(self, samples: Mapping[str, Sequence[Sample]]) -> brier.Score:
        """The score of a system, from its samples by id.

        Raises `UserError` for text without a tokenizer, and for a reference that lacks the kind of the samples (text or tokens).
        """
        is_text = all(isinstance(one, str) for several in samples.values() for one in several)
        target_R4 = self.targets(is_text)
        terms_R4 = np.zeros(target_R4.shape)
        by_number = collections.defaultdict(list)
        for row, name in enumerate(self._references):
            by_number[len(samples[name])].append((row, samples[name]))
        for group in by_number.values():
            row_G = [row for row, _ in group]
            sample_GS4 = np.stack([self._ngrams(several, _ENDED) for _, several in group])
            match_G4 = (sample_GS4 == target_R4[row_G, None]).cumprod(-1).mean(1)
            terms_R4[row_G] = 2 * match_G4 - np.asarray(brier.collisions(jnp.asarray(sample_GS4)))
        return self._score(terms_R4, target_R4)

    def floor(self, train_W4: np.ndarray, is_text: bool) -> brier.Score:
        """The score of sampling n-grams by their frequency in the training text (`brier.frequency_terms`)."""
        target_R4 = self.targets(is_text)
        terms_R14 = brier.frequency_terms(train_W4, np.maximum(target_R4[:, None], 0))
        return self._score(terms_R14[:, 0], target_R4)

    def targets(self, is_text: bool) -> np.ndarray:
        """The first four tokens of each reference, [R, 4].

        is_text: whether the samples are texts. The references' texts are then tokenised as the samples are; otherwise the
        references' `tokens` are used.
        """
        true: list[Sample] = []
        for reference in self._references.values():
            following = reference.text if is_text else reference.tokens
            if following is None:
                missing, ours = ("text", "texts") if is_text else ("tokens", "lists of tokens")
                raise UserError(
                    f"the reference {reference.id!r} has no {missing!r}, and the samples are {ours}"
                )
            true.append(following)
        return self._ngrams(true, _NOTHING)

    def _ngrams(self, several: Sequence[Sample], end: int) -> np.ndarray:
        """The first four tokens of each text or list of tokens; `end` after its end."""
        ngram_S4 = np.full((len(several), ORDERS), end, np.int32)
        for ngram_4, one in zip(ngram_S4, several, strict=True):
            if isinstance(one, str):
                if self._tokenizer is None:
                    raise UserError("text is scored by its tokens: give --tokenizer")
                one = self._tokenizer.encode(one)
            ngram_4[: len(one)] = one[:ORDERS]
        return ngram_S4

    def _score(self, terms_R4: np.ndarray, target_R4: np.ndarray) -> brier.Score:
        counted_R4 = target_R4 != _NOTHING
        each_B8 = np.zeros((self._block_R.max() + 1, 2 * ORDERS))
        each_R8 = np.concatenate([np.where(counted_R4, terms_R4, 0), counted_R4], axis=-1)
        np.add.at(each_B8, self._block_R, each_R8)
        return brier.score(brier.sums_of(jnp.asarray(each_B8, jnp.float32)))
