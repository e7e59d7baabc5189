"""Prompts in, text out: `Generator`, which the `generate` command, the notebooks and the end of a run share."""

import collections
import dataclasses
import operator
import pathlib
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax import processes
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError
from calm_jax.generation import SampleConfig, State, complete, go_on, start
from calm_jax.interrupt import poll
from calm_jax.mesh import make_mesh
from calm_jax.pool_samplers import Prefix
from calm_jax.sampler_search import Sampled
from calm_jax.streams import stream
from calm_jax.tasks import LmTask, Params
from calm_jax.workdir import Workdir, make_autoencoder_task, make_lm_task

# Chunks that are generated between two looks at stop strings.
_CHUNKS_A_CALL = 16
# Chunks of a sliding context that are read at once.
_PIECE = 64
# Prompts and caches have a power of two of chunks, from this one on, so that lengths share a compiled program.
_SMALLEST_BUCKET = 16

Prompt = str | Sequence[int]


@dataclasses.dataclass
class Continuation:
    """What follows a prompt.

    text: up to eos, a stop string or the last token. tokens: its ids, without eos; of a stop string all those it
    took. chunk_ends: how many tokens there were after each chunk. draws, decoded, exact: of each chunk,
    see `Sampled`. seconds: when each chunk was seen, from the beginning of its batch on; first calls compile. finish: "eos", "stop" or
    "length", empty while it goes on. alignment: how the prompt was brought to whole chunks: "whole", "pad", "left" or "match".
    match_draws: draws that "match" took, also where it ended in "left".
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
    finish: str = ""
    alignment: str = "whole"
    match_draws: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a chunk adds to the text of `continuation`, which has it already.

    Text that may yet turn out to be a stop string, or half a character, comes with a later piece.
    """

    continuation: Continuation
    text: str


def bucket(num_chunks: int) -> int:
    """The size that `num_chunks` chunks are given room for."""
    return max(_SMALLEST_BUCKET, 1 << (num_chunks - 1).bit_length())


def _held_back(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string, or half a character."""
    # Half a character may go on with what a stop string goes on with.
    whole = text.rstrip("\ufffd")
    begun = [size for word in stop for size in range(1, len(word)) if whole.endswith(word[:size])]
    return len(text) - len(whole) + max(begun, default=0)


class _Row:
    """A continuation in the making. ids: the prompt's."""

    def __init__(
        self,
        continuation: Continuation,
        ids: list[int],
        tokenizer: Tokenizer,
        options: SampleConfig,
    ):
        self.continuation, self.ids = continuation, ids
        self._tokenizer, self._options = tokenizer, options
        self._num_shown = 0

    def known(self, chunk_size: int) -> tuple[list[int], int]:
        """The prompt's whole chunks, and how many tokens its last, begun chunk lacks."""
        num_begun = len(self.ids) % chunk_size
        return self.ids[: len(self.ids) - num_begun], -len(self.ids) % chunk_size

    def add(self, chunk: Sampled, num_free: int, seconds: float) -> Piece:
        """Takes a chunk up to its eos, the last token or a stop string.

        num_free: of a chunk that the prompt began, how many last tokens are new; 0 for all.
        """
        to, options = self.continuation, self._options
        num_before = len(to.tokens)
        for token in chunk.tokens[-num_free:].tolist():
            if token == self._tokenizer.eos_id:
                to.finish = "eos"
                break
            to.tokens.append(token)
            if len(to.tokens) == options.max_tokens:
                to.finish = "length"
                break
        text = self._upto_stop(num_before)
        if not to.finish:
            text = text[: len(text) - _held_back(text, options.stop)]
        # Text only grows, though what was half a character may have been shown as whole.
        piece, self._num_shown = text[self._num_shown :], max(self._num_shown, len(text))
        to.text = text
        to.chunk_ends.append(len(to.tokens))
        to.draws.append(int(chunk.draws))
        to.decoded.append(int(chunk.decoded))
        to.exact.append(bool(chunk.exact))
        to.seconds.append(round(seconds, 6))
        return Piece(to, piece)

    def _upto_stop(self, num_before: int) -> str:
        """The text so far; at its first stop string it ends, and with it the tokens."""
        to, stop = self.continuation, self._options.stop
        text = self._tokenizer.decode(to.tokens)
        if not any(word in text for word in stop):
            return text
        to.finish = "stop"
        # Only the last chunk can have brought it; where several are there, the one that is whole first counts.
        for size in range(num_before + 1, len(to.tokens) + 1):
            text = self._tokenizer.decode(to.tokens[:size])
            if any(word in text for word in stop):
                to.tokens = to.tokens[:size]
                break
        return text[: min(text.index(word) for word in stop if word in text)]


class Generator:
    """A trained language model, ready to continue prompts.

    options: what the model's own run generates with; `dataclasses.replace` makes others of them.
    max_chunks: its context. task, params, frozen: `task.bind(params, frozen)` is the model as samplers see
    it. Compiled programs are kept from call to call.
    """

    def __init__(
        self, task: LmTask, params: Params, frozen: Params, tokenizer: Tokenizer, config: Config
    ):
        self.task, self.params, self.frozen = task, params, frozen
        self.tokenizer, self.options = tokenizer, config.sample
        self.max_chunks = config.lm.data.block_tokens // config.chunk_size
        self._config = config

    @property
    def has_autoencoder(self) -> bool:
        """Whether the model can only be sampled; else it knows its probabilities."""
        return self._config.has_autoencoder

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "Generator":
        """The model in a workdir. Raises `UserError` if there is none."""
        workdir = Workdir(pathlib.Path(folder))
        processes.check_same(workdir.facts)
        config = workdir.config
        mesh = make_mesh(config.mesh)
        with jax.set_mesh(mesh):
            task = make_lm_task(config, workdir.tokenizer, config.eval.published)
            params, frozen = workdir.load_params("lm", task, mesh), {}
            if config.has_autoencoder:
                autoencoder = make_autoencoder_task(config, workdir.tokenizer)
                frozen = {"params": workdir.load_params("autoencoder", autoencoder, mesh)}
        return cls(task, params, frozen, workdir.tokenizer, config)

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: SampleConfig | None = None,
        seed: int = 0,
        stream: bool = False,
    ) -> list[Continuation] | Iterator[Piece]:
        """What follows each prompt, in order; with `stream`, piece by piece as chunks come.

        A prompt is text, which follows bos, or token ids as they are; an empty one is bos alone. Its
        continuation depends on the seed, its place among the prompts, itself and the options, not on
        its neighbours. Raises `UserError` for what the model cannot take, before anything is computed.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts={prompts!r} must be a list of prompts: [{prompts!r}]")
        options = options or self.options
        if self.has_autoencoder:
            options.check_latent_head()
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed} must be in [0, 2**32)")
        rows = [self._row(index, prompt, options) for index, prompt in enumerate(prompts)]
        pieces = self._batches(rows, options, seed, 1 if stream else _CHUNKS_A_CALL)
        if stream:
            return pieces
        for _ in pieces:
            pass
        return [row.continuation for row in rows]

    def describe(self, done: Sequence[Continuation], options: SampleConfig) -> str:
        """How texts were sampled, in a line: what was asked for, and at what cost it was kept."""
        parts = [f"temperature {options.temperature:g}"]
        if not self.has_autoencoder:
            return f"{parts[0]}, top_p {options.top_p:g}"
        num_chunks = sum(len(one.draws) for one in done)
        if options.temperature < 1 and num_chunks:
            draws = sum(sum(one.draws) for one in done)
            approximate = num_chunks - sum(sum(one.exact) for one in done)
            parts += [
                f"sampler {options.sampler}: {draws / num_chunks:.3g} draws a chunk",
                f"{approximate} of {num_chunks} chunks not exact",
            ]
        if options.prompt_alignment == "match":
            ways = collections.Counter(one.alignment for one in done)
            draws = sum(one.match_draws for one in done)
            parts.append(
                f"prompts: {ways['whole']} of whole chunks, {ways['match']} completed by matching draws, "
                f"{ways['left']} filled up in front, {draws} draws"
            )
        return ", ".join(parts)

    def _row(self, index: int, prompt: Prompt, options: SampleConfig) -> "_Row":
        ids = self._ids(index, prompt)
        if options.long_context == "refuse":
            chunk_size = self.task.chunk_size
            needed = -(-len(ids) // chunk_size) - (-options.max_tokens // chunk_size)
            if needed > self.max_chunks:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens; with max_tokens={options.max_tokens} that makes {needed} chunks "
                    f"of {chunk_size}, and the model's context is {self.max_chunks}: shorten one of them, or let the "
                    "context slide with long_context=slide"
                )
        return _Row(Continuation(index, prompt), ids, self.tokenizer, options)

    def _ids(self, index: int, prompt: Prompt) -> list[int]:
        """bos and the prompt's tokens, or the ids given."""
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            try:
                return [tokenizer.bos_id, *tokenizer.encode(prompt)]
            except (UnicodeEncodeError, TypeError) as error:
                raise UserError(f"prompt {index}, {prompt!r}, is not valid Unicode text") from error
        ids = [operator.index(token) for token in prompt]
        for token in ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise UserError(
                    f"prompt {index}: token id {token} is not in the vocabulary, [0, {tokenizer.vocab_size})"
                )
        return ids or [tokenizer.bos_id]

    def _batches(
        self, rows: list["_Row"], options: SampleConfig, seed: int, chunks_a_call: int
    ) -> Iterator[Piece]:
        for first in range(0, len(rows), options.batch_size):
            yield from self._pieces(
                rows[first : first + options.batch_size], options, seed, chunks_a_call
            )

    def _pieces(
        self, rows: list["_Row"], options: SampleConfig, seed: int, chunks_a_call: int
    ) -> Iterator[Piece]:
        """Continues rows together, and looks at them every `chunks_a_call` chunks."""
        began = time.monotonic()
        prompts = []
        for row, completed in zip(rows, self._complete(rows, options, seed), strict=True):
            if completed is None:
                alignment = (
                    "left" if options.prompt_alignment == "match" else options.prompt_alignment
                )
                prompts.append(self._whole_chunks(row, alignment))
            else:
                whole, free = row.known(self.task.chunk_size)
                prompts.append([*whole, *completed.tokens])
                row.continuation.alignment = "match"
                yield row.add(completed, free, time.monotonic() - began)
        num_new = -(-options.max_tokens // self.task.chunk_size)
        state = self._start(prompts, num_new, options)
        key_B = _keys(seed, "generate", rows)
        step = 0
        while not all(row.continuation.finish for row in rows):
            ended_B = np.array([bool(row.continuation.finish) for row in rows])
            missing = max(
                options.max_tokens - len(row.continuation.tokens)
                for row in rows
                if not row.continuation.finish
            )
            state, chunks = go_on(
                self.task.bind,
                self.params,
                self.frozen,
                state._replace(ended=jnp.asarray(ended_B)),
                key_B,
                np.int32(min(chunks_a_call, -(-missing // self.task.chunk_size))),
                num_chunks=_CHUNKS_A_CALL,
                eos_id=self.tokenizer.eos_id,
                config=options.sampler_config,
            )
            chunks, last = processes.fetch((chunks, state.step))
            seconds = time.monotonic() - began
            poll()
            for place in range(last - step):
                for index, row in enumerate(rows):
                    if not row.continuation.finish:
                        chunk = Sampled(*(x[index, place] for x in chunks))
                        yield row.add(chunk, 0, seconds)
            step = last

    def _start(self, prompts: list[list[int]], num_new: int, options: SampleConfig) -> State:
        """Reads prompts of whole chunks, in shapes that prompts of similar lengths share."""
        chunk_size = self.task.chunk_size
        length_B = np.array([len(ids) // chunk_size for ids in prompts], np.int32)
        room = bucket(int(length_B.max()))
        if length_B.max() + num_new > self.max_chunks and options.long_context == "slide":
            window, piece = self.max_chunks, min(room, _PIECE)
            size = (-(-window // piece) + 1) * piece
        else:
            piece = room
            window = size = bucket(room + num_new)
        prompt_BLK = np.full((len(prompts), room, chunk_size), self.tokenizer.pad_id, np.int32)
        for row_LK, ids in zip(prompt_BLK, prompts, strict=True):
            row_LK.reshape(-1)[: len(ids)] = ids
        return start(
            self.task.bind,
            self.params,
            self.frozen,
            prompt_BLK,
            length_B,
            np.int32(window),
            size=size,
            piece=piece,
        )

    def _whole_chunks(self, row: "_Row", alignment: str) -> list[int]:
        """A row's prompt, filled up to whole chunks."""
        pads = [self.tokenizer.pad_id] * (-len(row.ids) % self.task.chunk_size)
        if pads:
            row.continuation.alignment = alignment
        return pads + row.ids if alignment == "left" else row.ids + pads

    def _complete(
        self, rows: list["_Row"], options: SampleConfig, seed: int
    ) -> list["Sampled | None"]:
        """For each row the chunk that its prompt's last tokens begin, if "match" is asked for and finds one."""
        chunk_size = self.task.chunk_size
        known = [row.known(chunk_size) for row in rows]
        asked_B = np.array(
            [
                options.prompt_alignment == "match" and len(whole) > 0 and free > 0
                for whole, free in known
            ]
        )
        if not asked_B.any():
            return [None] * len(rows)
        prefix_BK = np.zeros((len(rows), chunk_size), np.int32)
        for row, prefix_K, (whole, _) in zip(rows, prefix_BK, known, strict=True):
            given = row.ids[len(whole) :]
            prefix_K[: len(given)] = given
        # A row that has no whole chunk reads its tokens as if they were one; nothing is drawn for it.
        prompts = [
            whole if asked else self._whole_chunks(row, "left")
            for row, asked, (whole, _) in zip(rows, asked_B, known, strict=True)
        ]
        state = self._start(prompts, 0, options)
        length_B = np.array([chunk_size - free for _, free in known], np.int32)
        fits_B, chunks = complete(
            self.task.bind,
            self.params,
            self.frozen,
            state._replace(ended=jnp.asarray(~asked_B)),
            Prefix(jnp.asarray(prefix_BK), jnp.asarray(length_B)),
            _keys(seed, "match", rows),
            options.sampler_config,
        )
        fits_B, chunks = processes.fetch((fits_B, chunks))
        completed = []
        for index, row in enumerate(rows):
            row.continuation.match_draws = int(chunks.draws[index])
            one = Sampled(*(x[index] for x in chunks))
            completed.append(one if asked_B[index] and fits_B[index] else None)
        return completed


def _keys(seed: int, name: str, rows: list["_Row"]) -> jax.Array:
    """A key for each row, by its place among all prompts."""
    index_B = jnp.asarray([row.continuation.index for row in rows])
    return jax.vmap(jax.random.fold_in, (None, 0))(stream(seed, name), index_B)


def samples(
    task: LmTask, params: Params, frozen: Params, tokenizer: Tokenizer, config: Config
) -> str:
    """What a run writes at its end: the config's prompts and how the model goes on."""
    # A prompt that is too long for the model is no reason to end a run.
    options = dataclasses.replace(config.sample, long_context="slide")
    generator = Generator(task, params, frozen, tokenizer, config)
    done = generator.generate(options.prompts, options, config.seed)
    head = f"seed {config.seed}, {generator.describe(done, options)}"
    parts = [f"--- prompt: {one.prompt!r} ---\n{one.prompt}{one.text}" for one in done]
    return "\n\n".join([head, *parts]) + "\n"
