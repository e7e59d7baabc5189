"""Plans a conversion: which published tensor becomes which parameter of which stage, and the new workdir's config.

`make_plan` checks everything that can be checked without reading the tensors' numbers.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from ml_collections import ConfigDict

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import COMPUTATION_KEYS, MODEL_KEYS, Config, resolve
from calm_jax.data.tokenizers import Tokenizer, TokenizerConfig
from calm_jax.errors import UserError
from calm_jax.interop import names, published
from calm_jax.interop.autoencoders import SourceAutoencoder, autoencoder_of, read_autoencoder
from calm_jax.interop.published import PublishedConfig
from calm_jax.interop.source import check_tokenizer
from calm_jax.interop.weights import Weights
from calm_jax.tasks import AutoencoderTask, LmTask


@dataclasses.dataclass(frozen=True)
class Part:
    """The parameters of one stage, and where they are in a published checkpoint.

    Attributes:
      stage: "autoencoder" or "lm".
      rows: table from the parameters to tensors of `weights`.
      weights: the checkpoint that holds the tensors.
      like: nested dict of the parameters' shapes.
    """

    stage: str
    rows: list[names.Row]
    weights: Weights
    like: Mapping[str, Any]

    def shape(self, row: names.Row) -> tuple[int, ...]:
        return flax.traverse_util.flatten_dict(self.like, sep="/")[row.parameter].shape


# A tensor and the tensor that it should be equal to, each as (checkpoint, name).
Copy = tuple[tuple[Weights, str], tuple[Weights, str]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checked conversion.

    Attributes:
      architecture: `architectures[0]` in the checkpoint's config.json.
      config: the config of the new workdir.
      tokenizer: the tokenizer of the new workdir.
      parts: one for each stage.
      copies: pairs `((weights, name), (weights, name))` of a tensor that is no parameter and the tensor of a parameter
        that it should be a copy of.
      left_over: names of the tensors that are neither a parameter nor a copy.
      notes: lines to show to the user.
    """

    architecture: str
    config: Config
    tokenizer: Tokenizer
    parts: list[Part]
    copies: list[Copy]
    left_over: list[str]
    notes: list[str]

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(part.shape(row))) for part in self.parts for row in part.rows)


def check_overrides(overrides: Iterable[str]) -> None:
    """Raises `UserError` for a user's key, by its dotted name, that the checkpoint decides."""
    for key in overrides:
        if key.startswith(MODEL_KEYS) and key not in COMPUTATION_KEYS:
            raise UserError(f"--config.{key}: the checkpoint decides this key")
        if key in ("init_from", "autoencoder.checkpoint"):
            raise UserError(f"--config.{key}: the parameters come from the checkpoint")


def _recipe(
    base: ConfigDict,
    sections: Mapping[str, Any],
    overrides: Mapping[str, Any],
    chunk_size: int,
    context_chunks: int,
) -> Config:
    """The config of the new workdir: a published recipe with the checkpoint's model and the user's keys.

    Args:
      base: the recipe; changed in place.
      sections: configs read from the checkpoint, by dotted name.
      overrides: the user's keys, by dotted name.
      chunk_size: the chunk size K of the checkpoint's model.
      context_chunks: the checkpoint's context length; 0 if it does not say.

    """
    check_overrides(overrides)
    with base.unlocked():
        base.chunk_size = chunk_size
        for path, section in sections.items():
            *above, last = path.split(".")
            parent = base
            for key in above:
                parent = parent[key]
            parent[last] = ConfigDict(dataclasses.asdict(section))
    base.lm.token_loss_weight = base.lm.token_prior_weight = 0.0
    # The positions of a published model count chunks.
    if context_chunks:
        base.lm.data.block_tokens = context_chunks * chunk_size
    for stage in (base.autoencoder, base.lm):
        stage.data.block_tokens -= stage.data.block_tokens % chunk_size
    base.update_from_flattened_dict(overrides)
    return resolve(base)


def make_plan(
    folder: pathlib.Path,
    autoencoder_folder: pathlib.Path | None,
    tokenizer: Tokenizer,
    tokenizer_config: TokenizerConfig,
    recipes: Mapping[bool, ConfigDict],
    overrides: Mapping[str, Any],
) -> Plan:
    """Checks a checkpoint and plans its conversion.

    Args:
      folder: the checkpoint.
      autoencoder_folder: a language model's autoencoder; None to look for it as `ae_path` and inside the checkpoint.
      tokenizer: the model's tokenizer.
      tokenizer_config: the recipe's section `tokenizer` for it.
      recipes: the recipe for a model with an autoencoder (True) and without (False); changed in place.
      overrides: the user's keys of the recipe, by dotted name.

    Raises:
      UserError: for the first thing that is missing, damaged, unsupported or inconsistent.
    """
    config = PublishedConfig(folder)
    config.refuse_unsupported()
    check_tokenizer(config, tokenizer)
    weights = Weights(folder)
    kind = config.architecture
    sections: dict[str, Any] = {"tokenizer": tokenizer_config}
    autoencoder, chunk_size = None, 1
    if kind == published.AUTOENCODER:
        autoencoder = read_autoencoder(folder)
    elif kind != published.AUTOREGRESSIVE:
        autoencoder = autoencoder_of(config, weights, autoencoder_folder)
    if autoencoder_folder is not None and kind in (published.AUTOENCODER, published.AUTOREGRESSIVE):
        raise UserError(
            f"--autoencoder: {config.path} is of kind {kind}, which takes no autoencoder"
        )
    if autoencoder is not None:
        sections["autoencoder.model"] = autoencoder.config
        chunk_size = autoencoder.chunk_size
    if kind != published.AUTOENCODER:
        sections["lm.model"] = config.transformer()
        if kind != published.AUTOREGRESSIVE:
            sections["lm.head"] = config.head()
    base = recipes[kind != published.AUTOREGRESSIVE]
    base.stage = "autoencoder" if kind == published.AUTOENCODER else "all"
    says_context = kind != published.AUTOENCODER and config.has("max_position_embeddings")
    context_chunks = config.size("max_position_embeddings") if says_context else 0
    ours = _recipe(base, sections, overrides, chunk_size, context_chunks)

    parts = []
    if autoencoder is not None:
        autoencoder_task = make_autoencoder_task(ours, tokenizer)
        parts.append(_part("autoencoder", autoencoder.rows, autoencoder.weights, autoencoder_task))
    if kind != published.AUTOENCODER:
        body = config.transformer()
        rows = (
            names.autoregressive_rows(body, config.is_tied)
            if kind == published.AUTOREGRESSIVE
            else names.calm_rows(body, config.head())
        )
        lm_task = make_lm_task(ours, tokenizer)
        parts.append(_part("lm", rows, weights, lm_task))
    copies, left_over = _unused(parts, weights, autoencoder)
    notes = []
    if autoencoder is not None and autoencoder.prefix:
        notes.append(
            "the autoencoder's dropout, KL weight, KL clamp and norms' epsilon are not in its tensors: the published values are "
            "taken; --autoencoder=SRC reads them from its config.json"
        )
    if config.is_tied:
        notes.append(
            "the tied output projection becomes a separate parameter, equal to the embedding"
        )
    return Plan(kind, ours, tokenizer, parts, copies, left_over, notes)


def _part(
    stage: str, rows: list[names.Row], weights: Weights, task: AutoencoderTask | LmTask
) -> Part:
    """One stage's parameters, looked up in `weights`."""
    like = jax.eval_shape(task.init, jax.random.key(0))
    return Part(stage, names.find(rows, weights.tensors, like), weights, like)


def _unused(
    parts: list[Part], weights: Weights, autoencoder: SourceAutoencoder | None
) -> tuple[list[Copy], list[str]]:
    """`(copies, left over)`: the tensors of all checkpoints that are no parameter, as in `Plan`."""
    used = {
        (part.weights.folder, name)
        for part in parts
        for row in part.rows
        for name in row.published_names()
    }
    every = {source.folder: source for source in [weights, *(part.weights for part in parts)]}
    copies, left_over = [], []
    for folder, source in every.items():
        for name in source.tensors:
            if (folder, name) in used:
                continue
            equal = _should_equal(name, source, autoencoder)
            known = [pair for pair in equal if (pair[0].folder, pair[1]) in used]
            if known:
                copies.append(((source, name), known[0]))
            else:
                left_over.append(name)
    return copies, left_over


def _should_equal(
    name: str, source: Weights, autoencoder: SourceAutoencoder | None
) -> Iterator[tuple[Weights, str]]:
    """Yields the checkpoint and name of each tensor that should equal this one; not all of them need exist."""
    same = [name, names.alias(name)]
    if name == "lm_head.weight":
        same.append("model.embed_tokens.weight")
    for other in filter(None, same):
        yield source, other
        # A language model's checkpoint includes a copy of the autoencoder, which may also have a folder of its own.
        if autoencoder is not None and other.startswith(names.AUTOENCODER_PREFIX):
            yield autoencoder.weights, other.removeprefix(names.AUTOENCODER_PREFIX)


def check_copies(plan: Plan) -> None:
    """Raises `UserError` unless all copies of a tensor are bitwise equal."""
    for (source, name), (other_source, other) in plan.copies:
        ours, theirs = source.read(name), other_source.read(other)
        # Compared as bits, as 0 == -0 for floats.
        if ours.shape != theirs.shape or (ours.view(np.uint32) != theirs.view(np.uint32)).any():
            where = "" if source is other_source else f" of {other_source.folder}"
            raise UserError(
                f"{source.folder}: {name!r} should be a copy of {other!r}{where}, but differs: these weights do not belong together"
            )
