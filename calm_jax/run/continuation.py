"""Assembles sampled chunks to the text of one prompt, which ends at eos, at a stop string or after `max_tokens`."""

import dataclasses
import json
import time
from collections.abc import Sequence

from calm_jax.data.tokenizers import Tokenizer
from calm_jax.sampling.config import SampleConfig
from calm_jax.sampling.search import Sampled

Prompt = str | Sequence[int]


@dataclasses.dataclass
class Continuation:
    """The text that follows a prompt. During streaming, the fields hold what has been generated so far.

    Attributes:
      index: the prompt's place among all prompts of the call.
      prompt: the prompt, as it was given.
      text: the new text, up to eos, a stop string or the last token; without eos and without the stop string.
      tokens: ids of the new tokens, without eos; with a stop string's own tokens, up to the one that completes it.
      chunk_ends: `len(tokens)` after each chunk.
      draws, decoded, exact: one entry a chunk: latents drawn, tokens decoded, and whether the sampler was exact (see
        `calm_jax.sampling.search.Sampled`).
      candidates, pool: one entry a chunk, if `sample.shown_candidates` asks for them: the most frequent chunks of the pool
        that the chunk was chosen from, each as `{"text", "tokens", "votes"}`, and the number of draws in that pool; an empty
        list and 0 for a chunk that was not chosen from a pool.
      seconds: one entry a chunk: seconds from when the prompt got a place in the batch until the host had the chunk. The
        first call includes compilation.
      finish: "eos", "stop", "length" (`max_tokens`) or "cancelled"; empty while text is still being generated.
      alignment: how the prompt was brought to whole chunks: "whole" if it was, else "pad", "left" or "match" (see
        `sample.prompt_alignment` in configs/common.py).
      match_draws: draws that alignment "match" used, also if none matched and it fell back to "left".
    """

    index: int
    prompt: Prompt
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    chunk_ends: list[int] = dataclasses.field(default_factory=list)
    draws: list[int] = dataclasses.field(default_factory=list)
    decoded: list[int] = dataclasses.field(default_factory=list)
    exact: list[bool] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    candidates: list[list[dict]] = dataclasses.field(default_factory=list)
    pool: list[int] = dataclasses.field(default_factory=list)
    finish: str = ""
    alignment: str = "whole"
    match_draws: int = 0


def as_line(continuation: Continuation) -> str:
    """A continuation as a line of JSON."""
    return json.dumps(dataclasses.asdict(continuation), ensure_ascii=False) + "\n"


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a streamed text that one chunk adds.

    A stream withholds the end of a text while it may be the beginning of a stop string or an incomplete UTF-8
    character, and yields it with a later piece. If several chunks are generated in one call, the
    piece of the last one may hold the text of all of them.

    Attributes:
      continuation: the continuation that grows; its `text` already contains this piece.
      number: the chunk's number in the continuation, counted from 0.
      text: the characters to show now; may be empty.
      is_last: whether the text ends with this piece.
    """

    continuation: Continuation
    number: int
    text: str
    is_last: bool


def _num_withheld(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters may begin a stop string, or are an incomplete character (U+FFFD)."""
    # An incomplete character may turn out to be the next one of a stop string, so it does not interrupt a match.
    complete = text.rstrip("\ufffd")
    begun = [
        size for word in stop for size in range(1, len(word)) if complete.endswith(word[:size])
    ]
    return len(text) - len(complete) + max(begun, default=0)


class Row:
    """One row of a batch: a prompt's token ids, and the continuation that grows chunk by chunk.

    Attributes:
      continuation: the result so far.
      ids: the prompt's token ids, with bos.
      options: how to sample.
      seed: determines the row's random numbers, together with the continuation's index.
      began: `time.monotonic()` when the prompt got a place in the batch.
    """

    def __init__(
        self,
        continuation: Continuation,
        ids: list[int],
        tokenizer: Tokenizer,
        chunk_size: int,
        options: SampleConfig,
        seed: int,
    ):
        self.continuation, self.ids = continuation, ids
        self.options, self.seed, self.began = options, seed, 0.0
        self._tokenizer, self._chunk_size = tokenizer, chunk_size
        self._num_shown = 0

    @property
    def prompt_chunks(self) -> int:
        """The length of the prompt in chunks, with an incomplete last one."""
        return -(-len(self.ids) // self._chunk_size)

    @property
    def new_chunks(self) -> int:
        """How many chunks `max_tokens` new tokens are."""
        return -(-self.options.max_tokens // self._chunk_size)

    @property
    def missing_chunks(self) -> int:
        """How many chunks are still to be generated, if the text does not end before `max_tokens`."""
        return -(-(self.options.max_tokens - len(self.continuation.tokens)) // self._chunk_size)

    def split(self) -> tuple[list[int], list[int]]:
        """The prompt's ids as `(whole chunks, the tokens of an incomplete last chunk)`."""
        num_whole = len(self.ids) // self._chunk_size * self._chunk_size
        return self.ids[:num_whole], self.ids[num_whole:]

    def padded(self) -> list[int]:
        """The prompt's ids, padded to whole chunks as `prompt_alignment` says.

        With "match", a prompt is padded only if its last chunk was not completed by a draw, and then on the left.
        """
        pads = [self._tokenizer.pad_id] * (-len(self.ids) % self._chunk_size)
        pads_after = self.options.prompt_alignment == "pad"
        if pads:
            self.continuation.alignment = "pad" if pads_after else "left"
        return self.ids + pads if pads_after else pads + self.ids

    def append(self, chunk: Sampled, num_given: int, shows: bool = True) -> Piece:
        """Adds a chunk's tokens up to eos, the last of `max_tokens` or a stop string, and gives the text to show.

        Args:
          chunk: one row's chunk, with tokens [K].
          num_given: how many of its first tokens are the prompt's own.
          shows: whether this piece must have its text. If not, and if there are no stop strings to look for, the text comes with
            a later piece: decoding the whole text again for each chunk would take longer than a small model takes to generate it.
        """
        to, options = self.continuation, self.options
        num_before = len(to.tokens)
        for token in chunk.tokens[num_given:].tolist():
            if token == self._tokenizer.eos_id:
                to.finish = "eos"
                break
            to.tokens.append(token)
            if len(to.tokens) == options.max_tokens:
                to.finish = "length"
                break
        piece = ""
        if shows or options.stop or to.finish:
            text = self._decode_until_stop(num_before)
            if not to.finish:
                text = text[: len(text) - _num_withheld(text, options.stop)]
            # Characters that were shown are never taken back, even if the tokenizer decodes more tokens to fewer characters.
            piece, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
            to.text = text
        to.chunk_ends.append(len(to.tokens))
        to.draws.append(int(chunk.draws))
        to.decoded.append(int(chunk.decoded))
        to.exact.append(bool(chunk.exact))
        if chunk.candidates is not None:
            given = chunk.candidates
            to.candidates.append(
                [
                    {"text": self._tokenizer.decode(ids), "tokens": ids, "votes": votes}
                    for ids, votes in zip(given.chunk.tolist(), given.votes.tolist(), strict=True)
                    if votes
                ]
            )
            to.pool.append(int(given.pool))
        to.seconds.append(round(time.monotonic() - self.began, 6))
        return Piece(to, len(to.draws) - 1, piece, bool(to.finish))

    def _decode_until_stop(self, num_before: int) -> str:
        """The text up to the first stop string; if there is one, the tokens after it are removed.

        num_before: how many tokens came before the last chunk, which alone can have completed a stop string.
        """
        to, stop = self.continuation, self.options.stop
        text = self._tokenizer.decode(to.tokens)
        if not any(word in text for word in stop):
            return text
        to.finish = "stop"
        # Token by token: if the chunk completes more than one stop string, the one that is complete first ends the text.
        for size in range(num_before + 1, len(to.tokens) + 1):
            text = self._tokenizer.decode(to.tokens[:size])
            if any(word in text for word in stop):
                to.tokens = to.tokens[:size]
                break
        return text[: min(text.index(word) for word in stop if word in text)]
