"""What a conversion will do: which published tensor becomes which parameter of which stage, under which config.

Everything that can be checked without reading the numbers is checked here.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from ml_collections import ConfigDict

from calm_jax.config import Config, resolve
from calm_jax.data.tokenizers import Tokenizer, TokenizerConfig
from calm_jax.errors import UserError
from calm_jax.interop import names, published
from calm_jax.interop.published import PublishedConfig
from calm_jax.interop.source import check_tokenizer
from calm_jax.interop.weights import Weights, is_file
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.tasks import AutoencoderTask, LmTask
from calm_jax.workdir import make_autoencoder_task, make_lm_task

# Keys that the checkpoint decides, but for those that change no number.
_OF_THE_MODEL = ("chunk_size", "tokenizer.", "autoencoder.model.", "lm.model.", "lm.head.")
_FREE = ("lm.model.remat", "lm.model.attention")


@dataclasses.dataclass(frozen=True)
class Part:
    """One stage's parameters: `rows` says from which tensors of `weights`; `like` is the tree of their shapes."""

    stage: str
    rows: list[names.Row]
    weights: Weights
    like: Mapping[str, Any]

    def shape(self, row: names.Row) -> tuple[int, ...]:
        return flax.traverse_util.flatten_dict(self.like, sep="/")[row.parameter].shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """architecture: the published one. config: of the workdir to be. twins: pairs of tensors that have to be equal, as (weights, name).

    left_over: tensors that nothing here uses. notes: what the user should know.
    """

    architecture: str
    config: Config
    tokenizer: Tokenizer
    parts: list[Part]
    twins: list[tuple[tuple[Weights, str], tuple[Weights, str]]]
    left_over: list[str]
    notes: list[str]

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(part.shape(row))) for part in self.parts for row in part.rows)


@dataclasses.dataclass(frozen=True)
class _Autoencoder:
    """An autoencoder's tensors, named with `prefix`."""

    config: AutoencoderConfig
    chunk_size: int
    vocab_size: int
    weights: Weights
    prefix: str

    @property
    def rows(self) -> list[names.Row]:
        return names.prefixed(names.autoencoder_rows(self.config), self.prefix)


def _own_autoencoder(folder: pathlib.Path) -> _Autoencoder:
    config = PublishedConfig(folder)
    if config.architecture != published.AUTOENCODER:
        raise UserError(f"{config.path} is of kind {config.architecture}, not an autoencoder")
    config.refuse_what_is_not_computed()
    return _Autoencoder(
        config.autoencoder(),
        config.size("patch_size"),
        config.size("vocab_size"),
        Weights(folder),
        "",
    )


def _autoencoder_inside(weights: Weights) -> _Autoencoder:
    """The autoencoder in a language model's file, which says nothing of it but its tensors' shapes."""

    def shape(name: str) -> tuple[int, ...]:
        for candidate in (
            f"{names.AUTOENCODER_PREFIX}{name}",
            names.twin(f"{names.AUTOENCODER_PREFIX}{name}"),
        ):
            if candidate in weights.tensors and len(weights.tensors[candidate].shape) == 2:
                return weights.tensors[candidate].shape
        raise UserError(
            f"{weights.folder} has no whole autoencoder: {names.AUTOENCODER_PREFIX}{name} is missing"
        )

    def layers(part: str) -> int:
        pattern = re.compile(rf"{names.AUTOENCODER_PREFIX}{part}\.{part}_layers\.(\d{{1,6}})\.")
        return 1 + max(
            (int(match[1]) for match in map(pattern.match, weights.tensors) if match), default=-1
        )

    vocab_size, width = shape("encoder.embed_tokens.weight")
    config = published.inferred_autoencoder(
        latent_size=shape("encoder.hidden_to_latent.weight")[0] // 2,
        hidden_size=width,
        intermediate_size=shape("encoder.encoder_layers.0.mlp.gate_proj.weight")[0],
        num_encoder_layers=layers("encoder"),
        num_decoder_layers=layers("decoder"),
    )
    chunk_size = shape("encoder.squeeze_layer.weight")[1] // max(1, width)
    return _Autoencoder(config, chunk_size, vocab_size, weights, names.AUTOENCODER_PREFIX)


def _autoencoder_of(
    config: PublishedConfig, weights: Weights, folder: pathlib.Path | None
) -> _Autoencoder:
    """A language model's autoencoder: the one that `folder` has, or else the one inside.

    Without `folder`, the one that config.json names is taken if it is there: it says more than its tensors do.
    """
    if folder is None and config.has("ae_path"):
        named = pathlib.Path(str(config["ae_path"]))
        for candidate in (weights.folder / named.name, named):
            if is_file(candidate / "config.json") and candidate != weights.folder:
                folder = candidate
                print(f"autoencoder: that of {str(candidate)!r}, which config.json names")
                break
    if folder is not None:
        found = _own_autoencoder(folder)
    elif any(name.startswith(names.AUTOENCODER_PREFIX) for name in weights.tensors):
        found = _autoencoder_inside(weights)
    else:
        named = f" (config.json calls it {config['ae_path']!r})" if config.has("ae_path") else ""
        raise UserError(
            f"{weights.folder} has no autoencoder inside: give it with --autoencoder=SRC{named}"
        )
    for key, ours in (
        ("patch_size", found.chunk_size),
        ("latent_size", found.config.latent_size),
        ("vocab_size", found.vocab_size),
    ):
        if config.size(key) != ours:
            raise UserError(
                f"{config.path} has {key}={config[key]!r}, its autoencoder in {found.weights.folder} {ours}"
            )
    return found


def _recipe(
    base: ConfigDict,
    sections: Mapping[str, Any],
    overrides: Mapping[str, Any],
    chunk_size: int,
    context_chunks: int,
) -> Config:
    """The published recipe with a checkpoint's model in it, and the user's keys over that.

    context_chunks: the model's context; 0 if the checkpoint does not say.
    """
    for key in overrides:
        if key.startswith(_OF_THE_MODEL) and key not in _FREE:
            raise UserError(f"--config.{key}: the checkpoint decides this key")
        if key in ("init_from", "autoencoder.checkpoint"):
            raise UserError(f"--config.{key}: the parameters are those of the checkpoint")
    with base.unlocked():
        base.chunk_size = chunk_size
        for path, section in sections.items():
            *above, last = path.split(".")
            parent = base
            for key in above:
                parent = parent[key]
            parent[last] = ConfigDict(dataclasses.asdict(section))
    # Positions count chunks.
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
    """Checks a checkpoint and says what becomes of it. Raises `UserError` for the first thing that does not fit.

    recipes: for a model with an autoencoder (True) and without; overrides: keys of these by dotted name.
    """
    config = PublishedConfig(folder)
    config.refuse_what_is_not_computed()
    check_tokenizer(config, tokenizer)
    weights = Weights(folder)
    kind = config.architecture
    sections: dict[str, Any] = {"tokenizer": tokenizer_config}
    autoencoder, chunk_size = None, 1
    if kind == published.AUTOENCODER:
        autoencoder = _own_autoencoder(folder)
    elif kind != published.AUTOREGRESSIVE:
        autoencoder = _autoencoder_of(config, weights, autoencoder_folder)
    if autoencoder_folder is not None and kind in (published.AUTOENCODER, published.AUTOREGRESSIVE):
        raise UserError(f"--autoencoder: {config.path} is of kind {kind}, which takes none")
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
        task = make_autoencoder_task(ours, tokenizer)
        parts.append(_part("autoencoder", autoencoder.rows, autoencoder.weights, task))
    if kind != published.AUTOENCODER:
        body = config.transformer()
        rows = (
            names.autoregressive_rows(body, config.is_tied)
            if kind == published.AUTOREGRESSIVE
            else names.calm_rows(body, config.head())
        )
        task = make_lm_task(ours, tokenizer, ours.eval.published)
        parts.append(_part("lm", rows, weights, task))
    twins, left_over = _unused(parts, weights, autoencoder)
    notes = []
    if autoencoder is not None and autoencoder.prefix:
        notes.append(
            "the autoencoder's dropout, KL weights and norms' epsilon, which its tensors do not tell, are the published ones; "
            "--autoencoder=SRC reads them"
        )
    if config.is_tied:
        notes.append("the tied output becomes a parameter of its own, equal to the embedding")
    return Plan(kind, ours, tokenizer, parts, twins, left_over, notes)


def _part(
    stage: str, rows: list[names.Row], weights: Weights, task: AutoencoderTask | LmTask
) -> Part:
    like = jax.eval_shape(task.init, jax.random.key(0))
    return Part(stage, names.find(rows, weights.tensors, like), weights, like)


def _unused(
    parts: list[Part], weights: Weights, autoencoder: _Autoencoder | None
) -> tuple[list, list[str]]:
    """What becomes of the tensors that are no parameter: `(pairs that have to be equal, left over)`."""
    used = {
        (part.weights.folder, name)
        for part in parts
        for row in part.rows
        for name in row.published_names()
    }
    every = {source.folder: source for source in [weights, *(part.weights for part in parts)]}
    twins, left_over = [], []
    for folder, source in every.items():
        for name in source.tensors:
            if (folder, name) in used:
                continue
            equal = _equal_to(name, source, autoencoder)
            known = [pair for pair in equal if (pair[0].folder, pair[1]) in used]
            if known:
                twins.append(((source, name), known[0]))
            else:
                left_over.append(name)
    return twins, left_over


def _equal_to(
    name: str, source: Weights, autoencoder: _Autoencoder | None
) -> Iterator[tuple[Weights, str]]:
    """Where a tensor should be once more."""
    same = [name, names.twin(name)]
    if name == "lm_head.weight":
        same.append("model.embed_tokens.weight")
    for other in filter(None, same):
        yield source, other
        # The copy inside a language model, of an autoencoder that came by itself.
        if autoencoder is not None and other.startswith(names.AUTOENCODER_PREFIX):
            yield autoencoder.weights, other.removeprefix(names.AUTOENCODER_PREFIX)


def check_twins(plan: Plan) -> None:
    """Raises `UserError` unless what is there twice is bitwise the same."""
    for (source, name), (other_source, other) in plan.twins:
        ours, theirs = source.read(name), other_source.read(other)
        # As bits, where 0 and -0 differ.
        if ours.shape != theirs.shape or (ours.view(np.uint32) != theirs.view(np.uint32)).any():
            where = "" if source is other_source else f" of {other_source.folder}"
            raise UserError(
                f"{source.folder}: {name!r} should be a copy of {other!r}{where}, and is not: these weights do not belong together"
            )
