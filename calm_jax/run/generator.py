"""Prompts in, text out: `Generator`, used by the `generate` command, the notebooks and the end of a training run."""

import collections
import dataclasses
import itertools
import operator
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.files import local_path
from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError
from calm_jax.parallel import multihost
from calm_jax.parallel.mesh import adapted, make_mesh
from calm_jax.parallel.signals import poll
from calm_jax.rng import stream
from calm_jax.run.continuation import Continuation, Piece, Prompt, Row
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.config import SampleConfig
from calm_jax.sampling.decode import State, complete_prefix, decode, prefill
from calm_jax.sampling.pools import Prefix
from calm_jax.sampling.samplers import check_sampler
from calm_jax.sampling.search import Sampled
from calm_jax.tasks import LmTask, Params

# Chunks that one call of the compiled `decode` generates at most. Between calls the host looks for stop strings.
_CHUNKS_PER_CALL = 16
# Chunks that prefill reads at once where the context slides.
_CHUNKS_PER_READ = 64
# Prompts and caches are padded to a power of two of chunks, at least this many, so that similar lengths share a
# compiled program.
_SHORTEST_PADDED = 16


def padded_length(num_chunks: int) -> int:
    """The length to which `num_chunks` chunks are padded: the next power of two, at least 16."""
    return max(_SHORTEST_PADDED, 1 << (num_chunks - 1).bit_length())


class Generator:
    """A trained language model, ready to continue prompts. Compiled programs are kept from call to call.

    Attributes:
      task, params, frozen: the model; `task.bind(params, frozen)` is the `ChunkModel` that samplers use. frozen:
        the parameters of the autoencoder, empty for the autoregressive baseline.
      tokenizer: the model's tokenizer.
      options: the `sample` section of the model's config; `dataclasses.replace(options, ...)` changes some of them.
      max_chunks: the context, in chunks.
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
        """True for CALM, which can only be sampled; False for the baseline, which gives token probabilities."""
        return self._config.has_autoencoder

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "Generator":
        """Loads the latest language model of a workdir onto all devices that are here, whatever mesh it was trained on.

        Raises `UserError` if the folder has none.
        """
        workdir = Workdir(local_path(str(folder), "folder"))
        multihost.check_same(workdir.facts)
        config = workdir.config
        mesh = make_mesh(adapted(config.mesh, jax.device_count()))
        with jax.set_mesh(mesh):
            task = make_lm_task(config, workdir.tokenizer, config.eval.published)
            params, frozen = workdir.load_params("lm", task, mesh), {}
            if config.has_autoencoder:
                autoencoder = make_autoencoder_task(config, workdir.tokenizer)
                frozen = {"params": workdir.load_params("autoencoder", autoencoder, mesh)}
        return cls(task, params, frozen, workdir.tokenizer, config)

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        options: SampleConfig | None = None,
        seed: int = 0,
        stream: Literal[False] = False,
    ) -> list[Continuation]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        options: SampleConfig | None = None,
        seed: int = 0,
        *,
        stream: Literal[True],
    ) -> Iterator[Piece]: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        options: SampleConfig | None = None,
        seed: int = 0,
        stream: bool = False,
    ) -> list[Continuation] | Iterator[Piece]:
        """Continues every prompt.

        A continuation depends on the seed, the prompt, its place among the prompts and the options. It does not
        depend on the other prompts.

        Args:
          prompts: each is text, to which bos is prepended, or token ids, which are used as they are. An empty prompt
            is bos alone.
          options: how to sample; `self.options` if None.
          seed: of all random numbers, in [0, 2**32).
          stream: whether to give text while it is generated.

        Returns:
          The continuations in the order of the prompts; with `stream`, an iterator over pieces of text, one for each
          prompt and chunk.

        Raises:
          UserError: for prompts or options that the model cannot take, before anything is computed.
        """
        if isinstance(prompts, str):
            raise UserError(f"prompts={prompts!r} must be a list of prompts: [{prompts!r}]")
        options = options or self.options
        check_sampler("sampler", options.sampler)
        if self.has_autoencoder:
            options.check_latent_head()
        if not 0 <= seed < 2**32:
            raise UserError(f"seed={seed} must be in [0, 2**32)")
        rows = [self._make_row(index, prompt, options) for index, prompt in enumerate(prompts)]
        size, chunks_per_call = options.batch_size, 1 if stream else _CHUNKS_PER_CALL
        pieces = itertools.chain.from_iterable(
            self._generate_batch(rows[first : first + size], options, seed, chunks_per_call)
            for first in range(0, len(rows), size)
        )
        if stream:
            return pieces
        for _ in pieces:
            pass
        return [row.continuation for row in rows]

    def describe(self, done: Sequence[Continuation], options: SampleConfig) -> str:
        """One line about finished texts: the options that shaped them, the draws they took, how many are approximate."""
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
                f"{ways['left']} padded on the left, {draws} draws"
            )
        return ", ".join(parts)

    def _make_row(self, index: int, prompt: Prompt, options: SampleConfig) -> Row:
        ids = self._encode(index, prompt)
        if options.long_context == "refuse":
            chunk_size = self.task.chunk_size
            needed = -(-len(ids) // chunk_size) - (-options.max_tokens // chunk_size)
            if needed > self.max_chunks:
                raise UserError(
                    f"prompt {index} has {len(ids)} tokens; with max_tokens={options.max_tokens} that makes {needed} chunks "
                    f"of {chunk_size}, and the model's context is {self.max_chunks}: shorten one of them, or let the "
                    "context slide with long_context=slide"
                )
        return Row(Continuation(index, prompt), ids, self.tokenizer, options)

    def _encode(self, index: int, prompt: Prompt) -> list[int]:
        """A prompt's token ids: bos and the text's tokens, or the ids as they were given."""
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

    def _generate_batch(
        self, rows: list[Row], options: SampleConfig, seed: int, chunks_per_call: int
    ) -> Iterator[Piece]:
        """Continues the rows of one batch together; the host sees their text every `chunks_per_call` chunks."""
        began = time.monotonic()
        chunk_size = self.task.chunk_size
        prompts = []
        for row, completed in zip(rows, self._complete_prefixes(rows, options, seed), strict=True):
            if completed is None:
                alignment = (
                    "left" if options.prompt_alignment == "match" else options.prompt_alignment
                )
                prompts.append(self._pad_to_chunks(row, alignment))
            else:
                whole, given = row.split(chunk_size)
                prompts.append([*whole, *completed.tokens])
                row.continuation.alignment = "match"
                yield row.append(completed, len(given), time.monotonic() - began)
        num_new = -(-options.max_tokens // chunk_size)
        state = self._prefill(prompts, num_new, options)
        key_B = _row_keys(seed, "generate", rows)
        num_seen = 0
        while not all(row.continuation.finish for row in rows):
            ended_B = np.array([bool(row.continuation.finish) for row in rows])
            num_missing = max(
                options.max_tokens - len(row.continuation.tokens)
                for row in rows
                if not row.continuation.finish
            )
            state, chunks = decode(
                self.task.bind,
                self.params,
                self.frozen,
                state._replace(ended=jnp.asarray(ended_B)),
                key_B,
                np.int32(min(chunks_per_call, -(-num_missing // chunk_size))),
                num_chunks=_CHUNKS_PER_CALL,
                eos_id=self.tokenizer.eos_id,
                config=options.sampler_config,
            )
            chunks, num_generated = multihost.fetch_global((chunks, state.step))
            seconds = time.monotonic() - began
            poll()
            for place in range(num_generated - num_seen):
                for index, row in enumerate(rows):
                    if not row.continuation.finish:
                        chunk = Sampled(*(x[index, place] for x in chunks))
                        yield row.append(chunk, 0, seconds)
            num_seen = num_generated

    def _prefill(self, prompts: list[list[int]], num_new: int, options: SampleConfig) -> State:
        """Reads prompts of whole chunks into a cache with room for `num_new` more chunks.

        Shapes are padded, so that prompts of similar lengths share a compiled program. Under a sliding context the
        cache holds the window alone, and prompts are read part by part.
        """
        chunk_size = self.task.chunk_size
        length_B = np.array([len(ids) // chunk_size for ids in prompts], np.int32)
        length = padded_length(int(length_B.max()))
        if length_B.max() + num_new > self.max_chunks and options.long_context == "slide":
            window, piece = self.max_chunks, min(length, _CHUNKS_PER_READ)
            size = (-(-window // piece) + 1) * piece
        else:
            piece = length
            window = size = padded_length(length + num_new)
        shape = len(prompts), length, chunk_size
        prompt_BLK = np.full(shape, self.tokenizer.pad_id, np.int32)
        for row_LK, ids in zip(prompt_BLK, prompts, strict=True):
            row_LK.reshape(-1)[: len(ids)] = ids
        return prefill(
            self.task.bind,
            self.params,
            self.frozen,
            prompt_BLK,
            length_B,
            np.int32(window),
            size=size,
            piece=piece,
        )

    def _pad_to_chunks(self, row: Row, alignment: str) -> list[int]:
        """A row's prompt, padded to whole chunks: before it if `alignment` is "left", else after it."""
        pads = [self.tokenizer.pad_id] * (-len(row.ids) % self.task.chunk_size)
        if pads:
            row.continuation.alignment = alignment
        return pads + row.ids if alignment == "left" else row.ids + pads

    def _complete_prefixes(
        self, rows: list[Row], options: SampleConfig, seed: int
    ) -> list[Sampled | None]:
        """Samples each row's incomplete last chunk, given its first tokens, for `prompt_alignment="match"`.

        None for a row that needs no completion, has no whole chunk before it to condition on, or found no draw that
        matches within `max_draws`.
        """
        chunk_size = self.task.chunk_size
        split = [row.split(chunk_size) for row in rows]
        wanted_B = np.array(
            [
                options.prompt_alignment == "match" and len(whole) > 0 and len(given) > 0
                for whole, given in split
            ]
        )
        if not wanted_B.any():
            return [None] * len(rows)
        prefix_BK = np.zeros((len(rows), chunk_size), np.int32)
        for prefix_K, (_, given) in zip(prefix_BK, split, strict=True):
            prefix_K[: len(given)] = given
        # Prefill needs a chunk of every row. Rows that are not wanted are marked as ended: nothing is drawn for them.
        prompts = [
            whole if wanted else self._pad_to_chunks(row, "left")
            for row, wanted, (whole, _) in zip(rows, wanted_B, split, strict=True)
        ]
        state = self._prefill(prompts, 0, options)
        length_B = np.array([len(given) for _, given in split], np.int32)
        matched_B, chunks = complete_prefix(
            self.task.bind,
            self.params,
            self.frozen,
            state._replace(ended=jnp.asarray(~wanted_B)),
            Prefix(jnp.asarray(prefix_BK), jnp.asarray(length_B)),
            _row_keys(seed, "match", rows),
            options.sampler_config,
        )
        matched_B, chunks = multihost.fetch_global((matched_B, chunks))
        completed = []
        for index, row in enumerate(rows):
            row.continuation.match_draws = int(chunks.draws[index])
            chunk = Sampled(*(x[index] for x in chunks))
            completed.append(chunk if wanted_B[index] and matched_B[index] else None)
        return completed


def _row_keys(seed: int, name: str, rows: list[Row]) -> jax.Array:
    """A random key for each row, [B], by the prompt's place among all prompts of the call."""
    index_B = jnp.asarray([row.continuation.index for row in rows])
    return jax.vmap(jax.random.fold_in, (None, 0))(stream(seed, name), index_B)


def sample_text(
    task: LmTask, params: Params, frozen: Params, tokenizer: Tokenizer, config: Config
) -> str:
    """The text of samples.txt, which ends a training run: the prompts of `config.sample`, continued."""
    # A prompt that is longer than the model's context must not end a run.
    options = dataclasses.replace(config.sample, long_context="slide")
    generator = Generator(task, params, frozen, tokenizer, config)
    done = generator.generate(options.prompts, options, config.seed)
    head = f"seed {config.seed}, {generator.describe(done, options)}"
    parts = [f"--- prompt: {one.prompt!r} ---\n{one.prompt}{one.text}" for one in done]
    return "\n\n".join([head, *parts]) + "\n"
