"""Prompts in, text out: `Generator`, used by the `generate` command, the notebooks and the end of a training run."""

import collections
import dataclasses
import operator
import pathlib
from collections.abc import Iterator, Sequence
from typing import Literal, overload

import jax
from jax.sharding import Mesh

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.files import local_path
from calm_jax.config import Config
from calm_jax.data.documents import Document
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError, require_seed
from calm_jax.models.stack import for_generation
from calm_jax.parallel import multihost
from calm_jax.parallel.devices import memory_here
from calm_jax.parallel.mesh import make_mesh
from calm_jax.parallel.signals import poll
from calm_jax.planning.fitting import generation_mesh
from calm_jax.run.continuation import Continuation, Piece, Prompt, Row
from calm_jax.run.continuous_batch import ContinuousBatch, mesh_of_params, power_of_two
from calm_jax.run.workdir import Workdir
from calm_jax.sampling.config import SampleConfig
from calm_jax.sampling.decode import CHUNKS_PER_CALL
from calm_jax.sampling.samplers import check_sampler
from calm_jax.tasks import LmTask, Params


def mesh_here(config: Config, vocab_size: int) -> Mesh:
    """The mesh for generation on all available devices. All processes must call it."""
    # The smallest memory of all processes, so that all of them make the same mesh.
    memory = min(multihost.all_gather(memory_here()))
    return make_mesh(generation_mesh(config, vocab_size, jax.devices(), memory))


class Generator:
    """A trained language model, ready to continue prompts. Compiled programs are kept from call to call.

    Attributes:
      task, params, frozen: the model; `task.bind(params, frozen)` is the `ChunkModel` that samplers use. `params` and
        `frozen` are in the layout of `calm_jax.models.stack.for_generation`. `frozen` has the parameters of the autoencoder,
        and is empty for the autoregressive baseline.
      tokenizer: the model's tokenizer.
      options: the `sample` section of the model's config; `dataclasses.replace(options, ...)` changes some of them.
      max_chunks: the context, in chunks.
    """

    def __init__(
        self, task: LmTask, params: Params, frozen: Params, tokenizer: Tokenizer, config: Config
    ):
        mesh = mesh_of_params(params)
        self.params = for_generation(params, config.compute_dtype, task.stacks, mesh)
        self.task, self.frozen = task, for_generation(frozen, "float32", (), mesh)
        self.tokenizer, self.options = tokenizer, config.sample
        self.max_chunks = config.max_chunks
        self._config = config

    @property
    def has_autoencoder(self) -> bool:
        """True for CALM, which can only be sampled; False for the baseline, which gives token probabilities."""
        return self._config.has_autoencoder

    @classmethod
    def load(cls, folder: str | pathlib.Path) -> "Generator":
        """Loads the latest language model of a workdir onto all available devices, whatever mesh it was trained on.

        Each device holds all parameters, if they fit into it (`calm_jax.planning.fitting.generation_mesh`).

        Raises `UserError` if the folder has no trained language model.
        """
        workdir = Workdir(local_path(str(folder), "folder"))
        multihost.check_same(workdir.facts)
        config = workdir.config
        mesh = mesh_here(config, workdir.tokenizer.vocab_size)
        with jax.set_mesh(mesh):
            task = make_lm_task(config, workdir.tokenizer)
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

        The random numbers of a continuation depend on the seed, the prompt, its place among the prompts and the options, and not
        on the other prompts. These decide only with which shapes programs are compiled, and so how results are rounded.

        Args:
          prompts: each is text, to which bos is prepended, or token ids, which are used as they are. An empty prompt
            is bos alone.
          options: how to sample; `self.options` if None.
          seed: the seed of all random numbers, in [0, 2**32).
          stream: whether to give text while it is generated.

        Returns:
          The continuations in the order of the prompts; with `stream`, an iterator over pieces of text, one for each
          prompt and chunk.

        Raises:
          UserError: for prompts or options that the model cannot take, before anything is computed.
        """
        rows = self.rows(prompts, options or self.options, seed)
        if stream:
            return self._pieces(rows, 1)
        for _ in self._pieces(rows, CHUNKS_PER_CALL):
            pass
        return [row.continuation for row in rows]

    def finish_each(
        self, prompts: Sequence[Prompt], options: SampleConfig | None = None, seed: int = 0
    ) -> Iterator[Continuation]:
        """Yields each continuation of `generate` when it is finished, so not in the order of the prompts."""
        rows = self.rows(prompts, options or self.options, seed)
        pieces = self._pieces(rows, CHUNKS_PER_CALL)
        return (piece.continuation for piece in pieces if piece.is_last)

    def rows(
        self, prompts: Sequence[Prompt], options: SampleConfig, seed: int, texts_per_prompt: int = 1
    ) -> list[Row]:
        """The prompts as rows of a `ContinuousBatch` of this model, each as often as it has texts. Raises `UserError` as `generate` does."""
        if isinstance(prompts, str):
            raise UserError(f"prompts={prompts!r} must be a list of prompts: [{prompts!r}]")
        check_sampler("sampler", options.sampler)
        options.check_head(self.has_autoencoder)
        if self.has_autoencoder:
            options.check_token_prior(self._config.lm.token_prior_weight)
        require_seed("seed", seed)
        rows = []
        for number, prompt in enumerate(prompts):
            ids = self._encode(number, prompt)
            for index in range(number * texts_per_prompt, (number + 1) * texts_per_prompt):
                continuation, chunk_size = Continuation(index, prompt), self.task.chunk_size
                rows.append(Row(continuation, ids, self.tokenizer, chunk_size, options, seed))
            self._check_length(number, rows[-1])
        return rows

    def batch(self, num_places: int) -> ContinuousBatch:
        """An empty batch, in which up to `num_places` prompts are continued together."""
        model = self.task, self.params, self.frozen
        return ContinuousBatch(*model, self.tokenizer, self.max_chunks, num_places)

    def _pieces(self, rows: list[Row], chunks_per_call: int) -> Iterator[Piece]:
        """Continues rows that have the same options; the host sees their text every `chunks_per_call` chunks."""
        if not rows:
            return
        # A power of two, so that similar numbers of prompts share compiled programs.
        batch = self.batch(min(rows[0].options.batch_size, power_of_two(len(rows))))
        for row in rows:
            batch.submit(row)
        while not batch.is_idle:
            pieces = batch.step(chunks_per_call)
            poll()
            yield from pieces

    def describe(self, done: Sequence[Continuation], options: SampleConfig) -> str:
        """One line about finished texts: sampling options, draws per chunk, and how many chunks are approximate."""
        parts = [f"temperature {options.temperature:g}"]
        if not self.has_autoencoder:
            return f"{parts[0]}, top_p {options.top_p:g}"
        num_chunks = sum(len(one.draws) for one in done)
        if options.temperature == 1:
            parts.append("1 draw a chunk with every sampler")
        elif options.sampler == "noise":
            # The distribution that this sampler draws from is not known, so no chunk can be called exact.
            parts.append("sampler noise: 1 draw a chunk")
        elif num_chunks:
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

    def _check_length(self, number: int, row: Row) -> None:
        """Raises `UserError` if a text of the prompt of this number exceeds the model's context, and must not slide."""
        needed = row.prompt_chunks + row.new_chunks
        if row.options.long_context == "refuse" and needed > self.max_chunks:
            raise UserError(
                f"prompt {number} has {len(row.ids)} tokens; with max_tokens={row.options.max_tokens} that makes {needed} chunks "
                f"of {self.task.chunk_size}, and the model's context is {self.max_chunks}: shorten one of them, or let "
                "the context slide with long_context='slide' (the command's --long_context=slide)"
            )

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


def sample_text(
    task: LmTask,
    params: Params,
    frozen: Params,
    tokenizer: Tokenizer,
    config: Config,
    records: Sequence[Document],
) -> tuple[str, list[Continuation]]:
    """Continues the prompts of `config.sample` at the end of training, or those of `records` if it has none.

    Returns the text of samples.txt, and the continuations.
    """
    # A prompt that is longer than the model's context must not end the run with an error.
    options = dataclasses.replace(config.sample, long_context="slide")
    generator = Generator(task, params, frozen, tokenizer, config)
    # Without records, such as if the validation text is running text: the start of a document.
    shown = (
        [(prompt, "") for prompt in options.prompts]
        or [(record.prompt or "", f", completion: {record.text!r}") for record in records]
        or [("", "")]
    )
    done = generator.generate([prompt for prompt, _ in shown], options, config.seed)
    head = f"seed {config.seed}, {generator.describe(done, options)}"
    parts = [
        f"--- prompt: {one.prompt!r}{expected} ---\n{one.prompt}{one.text}"
        for one, (_, expected) in zip(done, shown, strict=True)
    ]
    return "\n\n".join([head, *parts]) + "\n", done
