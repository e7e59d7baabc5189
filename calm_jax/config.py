"""The resolved config: frozen, validated dataclasses made from a ConfigDict, and the keys that a resume must not change.

`resolve` makes a `Config`. Each section is a dataclass, defined in the module that uses it (`TrainingConfig` in
training/step.py and so on), and checks its own values; `Config` checks values of several sections against each other.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from calm_jax.data.corpus import DataConfig
from calm_jax.data.packing import BlockConfig
from calm_jax.data.tokenizers import TokenizerConfig
from calm_jax.errors import (
    UserError,
    nearest,
    require_at_least,
    require_one_of,
    require_seed,
    require_within,
)
from calm_jax.evaluation.evaluator import EvalConfig
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.heads import HEADS, LATENT_HEADS, HeadConfig
from calm_jax.models.transformer import TransformerConfig
from calm_jax.parallel.mesh import MeshConfig
from calm_jax.sampling.config import SampleConfig
from calm_jax.sampling.samplers import check_sampler
from calm_jax.training.checkpoint import CheckpointConfig
from calm_jax.training.optimizer import OptimizerConfig
from calm_jax.training.step import TrainingConfig

STAGES = ("autoencoder", "lm", "all")


@dataclasses.dataclass(frozen=True)
class AutoencoderStage:
    """`config.autoencoder`; every key is described in `configs/common.py`."""

    checkpoint: str
    min_accuracy: float
    random_chunks: float
    model: AutoencoderConfig
    data: BlockConfig
    optimizer: OptimizerConfig
    training: TrainingConfig

    def __post_init__(self):
        for name in ("min_accuracy", "random_chunks"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"autoencoder.{name}={getattr(self, name)} must be in [0, 1]")


@dataclasses.dataclass(frozen=True)
class LmStage:
    """`config.lm`; every key is described in `configs/common.py`."""

    model: TransformerConfig
    head: HeadConfig
    token_loss_weight: float
    token_prior_weight: float
    data: BlockConfig
    optimizer: OptimizerConfig
    training: TrainingConfig

    def __post_init__(self):
        # Products with them stay far below the largest float32.
        require_within(0, 1e6, self, "lm.", "token_loss_weight", "token_prior_weight")
        if self.token_loss_weight and self.head.name not in LATENT_HEADS:
            raise UserError(
                f"lm.token_loss_weight={self.token_loss_weight}: lm.head.name={self.head.name!r} predicts tokens itself, "
                "give 0"
            )
        if self.token_prior_weight and not self.token_loss_weight:
            raise UserError(
                f"lm.token_prior_weight={self.token_prior_weight} needs the token predictor, which lm.token_loss_weight=0 leaves "
                "out: give --config.lm.token_prior_weight=0, or a lm.token_loss_weight above 0"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole recipe; every key is described in `configs/common.py`."""

    seed: int
    stage: str
    init_from: str
    chunk_size: int
    compute_dtype: str
    data: DataConfig
    tokenizer: TokenizerConfig
    autoencoder: AutoencoderStage
    lm: LmStage
    eval: EvalConfig
    sample: SampleConfig
    checkpoint: CheckpointConfig
    mesh: MeshConfig

    def __post_init__(self):
        require_seed("seed", self.seed)
        require_one_of("stage", self.stage, STAGES)
        require_one_of("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))
        require_at_least(1, self, "", "chunk_size")
        check_sampler("sample.sampler", self.sample.sampler)
        try:
            self.sample.check_token_prior(self.lm.token_prior_weight)
            self.sample.check_head(self.has_autoencoder)
        except UserError as error:
            # The same checks are for options of generation, which are in no section.
            raise UserError(f"sample.{error}") from error
        self._check_head()
        if self.stage == "autoencoder" and self.autoencoder.checkpoint:
            raise UserError(
                f"autoencoder.checkpoint={self.autoencoder.checkpoint!r} names a trained autoencoder, and stage='autoencoder' trains "
                "one: give --config.stage=lm, or leave autoencoder.checkpoint out"
            )
        if self.init_from and self.autoencoder.checkpoint:
            raise UserError(
                f"autoencoder.checkpoint={self.autoencoder.checkpoint!r}: init_from={self.init_from!r} brings its own "
                "autoencoder, leave one of them out"
            )
        data = self.lm.data
        if self.data.prompt_field and not (data.append_eos and data.align_documents_to_chunks):
            raise UserError(
                f"data.prompt_field={self.data.prompt_field!r} needs lm.data.append_eos and "
                "lm.data.align_documents_to_chunks to be True: a completion ends with eos, padded to a whole chunk"
            )
        if self.autoencoder.data.isolate_documents:
            raise UserError(
                "autoencoder.data.isolate_documents=True: an autoencoder's chunks never see each other, give "
                "--config.autoencoder.data.isolate_documents=False"
            )
        for name in ("autoencoder", "lm"):
            stage = getattr(self, name)
            block = stage.data.block_tokens
            if block % self.chunk_size:
                raise UserError(
                    f"{name}.data.block_tokens={block} must be a multiple of chunk_size={self.chunk_size}"
                )
            _check_batch_tokens(f"{name}.training.batch_size", stage.training.batch_size, block)
            if block < 2 * self.chunk_size:
                raise UserError(
                    f"{name}.data.block_tokens={block} must hold at least 2 chunks of chunk_size={self.chunk_size}"
                )
        block = self.lm.data.block_tokens
        _check_batch_tokens(
            "eval.batch_size", self.eval.batch_size, max(block, self.eval.block_tokens)
        )
        if not len(self.eval.published.starts(block, self.chunk_size)):
            raise UserError(
                f"lm.data.block_tokens={block} is too short to score: scoring needs at least four tokens after the "
                f"first chunk (chunk_size={self.chunk_size}), and one chunk more with eval.skip_last_start=True"
            )

    def _check_head(self) -> None:
        """Raises `UserError` for values that the head does not support."""
        if self.has_autoencoder:
            return
        if self.chunk_size != 1:
            raise UserError(
                f"chunk_size={self.chunk_size}: lm.head.name='softmax' predicts single tokens, give chunk_size=1"
            )
        if self.eval.skip_last_start:
            raise UserError(
                "eval.skip_last_start=True: the published code skips the last start for CALM alone, not for "
                "lm.head.name='softmax': give --config.eval.skip_last_start=False"
            )
        if self.stage == "autoencoder" or self.autoencoder.checkpoint:
            key = "autoencoder.checkpoint" if self.autoencoder.checkpoint else "stage"
            value = self.autoencoder.checkpoint or self.stage
            raise UserError(f"{key}={value!r}: lm.head.name='softmax' has no autoencoder")

    @property
    def has_autoencoder(self) -> bool:
        """True for CALM, which predicts an autoencoder's latents; False for the autoregressive baseline (softmax head)."""
        return self.lm.head.name in LATENT_HEADS

    @property
    def autoencoder_source(self) -> str:
        """The workdir whose autoencoder is used without training it; empty if this recipe trains its own in stage 1."""
        from_init = self.has_autoencoder and "autoencoder" not in self.stages
        return self.autoencoder.checkpoint or (self.init_from if from_init else "")

    @property
    def max_chunks(self) -> int:
        """The language model's context, in chunks."""
        return self.lm.data.block_tokens // self.chunk_size

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages to train, in order, without that of an autoencoder of another run. A softmax head has stage "lm"
        alone."""
        if not self.has_autoencoder:
            return ("lm",)
        asked = ("autoencoder", "lm") if self.stage == "all" else (self.stage,)
        return tuple(name for name in asked if name == "lm" or not self.autoencoder.checkpoint)


# The largest integer that a key other than a seed may have, because JAX's integers have 32 bits.
_MOST_WHOLE = 2**31 - 1
# Keys that end with these words are sizes or counts of things in memory; none may be larger than `_MOST_SIZE`.
_SIZES = (
    *("_size", "_tokens", "_layers", "_heads", "_samples", "num_blocks"),
    *("_draws", "_candidates", "_at_once"),
)
_MOST_SIZE = 2**24
# The most tokens in a batch, which the host holds in memory: a hundred times as many as in the published recipes.
_MOST_BATCH_TOKENS = 2**28

# Keys that older versions lacked, each with the value that gives the older behaviour, so that older workdirs stay readable.
_ADDED: dict[str, Any] = {
    "autoencoder.random_chunks": 0.0,
    "lm.token_loss_weight": 0.0,
    "lm.token_prior_weight": 0.0,
    "sample.shown_candidates": 0,
    "sample.token_prior_scale": 1.0,
    "tokenizer.whitespace_pieces": False,
}
# Keys that older versions lacked, each with the key of the same section whose value it then takes.
_ADDED_AS = {"lm.model.rms_norm_epsilon": "norm_epsilon"}
# Keys of "lm.head" that older versions had for a loss that is no longer there. The first is its weight.
_REMOVED = ("decoded_brier_weight", "decoded_brier_delay", "decoded_brier_temperature")
# Keys whose type has changed since an older version, with the end of the error message about a value of the older type.
_OLDER_TYPES = {"lm.model.remat": ": 'full' is what True was, 'none' what False was"}


def _build(cls: Any, section: Mapping[str, Any], path: str) -> Any:
    """Makes the dataclass `cls` from a section of the config. `path` is the prefix of its keys, such as "lm.model."; empty
    for the whole config.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # Each head has its own keys, so --config.lm.head.name=NAME alone cannot change the head.
    hint = "; choose a head by --config=RECIPE.py:head=NAME" if path == "lm.head." else ""
    if not hasattr(section, "keys"):  # a dict or a ConfigDict
        name = path.rstrip(".") or "the config"
        raise UserError(f"{name}={section!r} must be a section of keys")
    for key in section:
        if key not in fields:
            raise UserError(f"config has no key {path}{key!s}: {nearest(key, list(fields))}{hint}")
    values = {}
    hints: dict[str, Any] = typing.get_type_hints(cls)
    for name in fields:
        key = f"{path}{name}"
        if name not in section and _ADDED_AS.get(key) in section:
            section = {**section, name: section[_ADDED_AS[key]]}
        if name not in section and key not in _ADDED:
            older = "; if this is a config.json of an older version, add the key with its value in configs/common.py"
            raise UserError(f"the config lacks the key {path}{name}{hint or older}")
        value, kind = section[name] if name in section else _ADDED[key], hints[name]
        if kind == HeadConfig:
            kind = _head_config(value)
        if dataclasses.is_dataclass(kind):
            value = _build(kind, value, f"{path}{name}.")
        elif isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple:
            value = _tuple_of(kind.__args__[0], value, f"{path}{name}")
        elif kind is float and type(value) is int:
            value = _as_float(key, value)
        elif kind is int and type(value) is int:
            _check_whole(key, value)
        elif kind is float and isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{path}{name}={value!r} must be a finite number")
        elif type(value) is not kind:
            older = _OLDER_TYPES.get(f"{path}{name}", "")
            raise UserError(f"{path}{name}={value!r} must be {kind.__name__}{older}")
        values[name] = value
    try:
        return cls(**values)
    except UserError as error:
        # A section that both stages have names its key without the stage, such as "training.num_steps". Add the stage.
        top, message = path.split(".")[0], str(error)
        known = not path or message.startswith((f"{top}.", f"{top}:"))
        raise UserError(message if known else f"{top}.{message}") from error


def _check_whole(key: str, value: int) -> None:
    """Raises `UserError` for an integer so large that int32 would overflow, or memory run out, before a later check."""
    if key.endswith("seed"):
        return  # seeds have checks of their own: they go up to 2**32 - 1
    most = _MOST_SIZE if key.endswith(_SIZES) else _MOST_WHOLE
    if value > most:
        raise UserError(f"{key}={value} must be at most {most}")
    if value < -most:
        raise UserError(f"{key}={value} must be at least {-most}")


def _as_float(key: str, value: int) -> float:
    """Converts an integer that is given for a float key. Raises `UserError` if no float is as large."""
    try:
        return float(value)
    except OverflowError as error:
        raise UserError(f"{key}={str(value)[:20]}... must be a finite number") from error


def _check_batch_tokens(key: str, rows: int, block: int) -> None:
    if rows * block > _MOST_BATCH_TOKENS:
        raise UserError(
            f"{key}={rows} blocks of {block} tokens are more than {_MOST_BATCH_TOKENS} tokens at once"
        )


def _tuple_of(kind: type, value: Any, key: str) -> tuple:
    if not isinstance(value, (list, tuple)):
        raise UserError(f"{key}={value!r} must be a tuple of {kind.__name__}")
    allowed = (float, int) if kind is float else (kind,)
    if any(type(x) not in allowed for x in value):
        raise UserError(f"{key}={value!r} must hold values of type {kind.__name__} only")
    if kind is float:
        floats = tuple(_as_float(key, x) if type(x) is int else x for x in value)
        if not all(map(math.isfinite, floats)):
            raise UserError(f"{key}={value!r} must hold finite numbers only")
        return floats
    if kind is int:
        for x in value:
            _check_whole(key, x)
    return tuple(value)


def _head_config(section: Mapping[str, Any]) -> type:
    if not hasattr(section, "keys"):
        raise UserError(f"lm.head={section!r} must be a section of keys")
    if "name" not in section:
        raise UserError("the config lacks the key lm.head.name")
    name = section["name"]
    require_one_of("lm.head.name", name, HEADS)
    return HEADS[name][1]


def resolve(tree: Mapping[str, Any]) -> Config:
    """Makes a validated `Config` from a ConfigDict or a stored config.json.

    Raises:
      UserError: with the key and its value, for a key that is unknown or missing, a wrong type, or a value out of range.
    """
    return _build(Config, tree, "")


def _stored_head(stored: Any) -> Mapping[str, Any]:
    """The section "lm.head" of a stored config; empty if it is missing or no section."""
    for name in ("lm", "head"):
        stored = stored.get(name) if isinstance(stored, Mapping) else None
    return stored if isinstance(stored, Mapping) else {}


def resolve_stored(stored: Mapping[str, Any]) -> Config:
    """`resolve` for the content of a config.json, which may have the keys of `removed_loss`."""
    head = _stored_head(stored)
    kept = {key: value for key, value in head.items() if key not in _REMOVED}
    if len(kept) < len(head):
        stored = {**stored, "lm": {**stored["lm"], "head": kept}}
    return resolve(stored)


def removed_loss(stored: Mapping[str, Any]) -> str:
    """The key and value of a loss with which the run of a config.json was trained, and which is no longer there; or ""."""
    weight = _stored_head(stored).get(_REMOVED[0])
    return f"lm.head.{_REMOVED[0]}={weight!r}" if weight else ""


def as_dict(config: Config) -> dict[str, Any]:
    """The config as nested dicts."""
    return dataclasses.asdict(config)


def as_json(config: Config) -> str:
    """The content of config.json."""
    return json.dumps(as_dict(config), indent=2) + "\n"


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested dict with their dotted keys, such as "lm.model.num_layers"; tuples as lists, as JSON has them."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", list(value) if isinstance(value, tuple) else value


# Keys that decide which parameters a model has, what they mean and how they are scored. No command may load a workdir's
# parameters with other values of these keys.
MODEL_KEYS = (
    "chunk_size",
    "tokenizer.",
    "autoencoder.model.",
    "lm.model.",
    "lm.head.",
    "lm.token_loss_weight",
    "lm.token_prior_weight",
)
# Keys that decide what a run trains on. Other values would change a resumed run without an error, so training refuses
# them; other commands accept them.
_TRAINING_KEYS = (
    "seed",
    "compute_dtype",
    "data.",
    "init_from",
    "autoencoder.checkpoint",
    "autoencoder.random_chunks",
    "autoencoder.data.",
    "autoencoder.training.batch_size",
    "lm.data.",
    "lm.training.batch_size",
)
# Keys of a model that change how it is computed, and no number but for rounding.
COMPUTATION_KEYS = ("lm.model.remat", "lm.model.attention")
# Keys of a model that change how its draws are made and decoded.
_DRAWING_KEYS = ("lm.head.num_steps", "lm.head.solver", "lm.token_prior_weight")
# Keys of a model that change how it is trained.
_LOSS_KEYS = (
    *("autoencoder.model.dropout", "autoencoder.model.kl_clamp", "autoencoder.model.kl_weight"),
    *("lm.head.num_samples", "lm.head.num_target_samples", "lm.head.beta"),
)
# Keys of a model that change neither which parameters it has nor what they mean: a run may start from the parameters of a run with
# other values.
NO_PARAMETER_KEYS = COMPUTATION_KEYS + _DRAWING_KEYS + _LOSS_KEYS
# Exceptions, which may differ in every command: the last three change how bad records are handled, how text is read and where the
# tokenizer's file is.
_FREE_KEYS = (
    *COMPUTATION_KEYS,
    *_DRAWING_KEYS,
    "data.on_bad_record",
    "data.read_threads",
    "tokenizer.path",
)
# Only a run that trains its tokenizer reads this key.
_TRAINED_TOKENIZER_KEY = "tokenizer.whitespace_pieces"


def differences(ours: Mapping[str, Any], stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """`(key, our value, stored value)` of each dotted key in which two nested dicts differ, such as configs from `as_dict`."""
    ours_flat, stored_flat = dict(leaves(ours)), dict(leaves(stored))
    missing = "(no such key)"
    pairs = [
        (key, ours_flat.get(key, missing), stored_flat.get(key, missing))
        for key in ours_flat | stored_flat
    ]
    return [(key, a, b) for key, a, b in pairs if a != b]


def differing_keys(
    ours: Mapping[str, Any], stored: Mapping[str, Any], training: bool
) -> list[tuple[str, Any, Any]]:
    """The keys that must have the same value in a command's config and in the workdir's config, and do not.

    Args:
      ours: the config of this command, from `as_dict`.
      stored: the config of the workdir.
      training: True to resume training, which fixes more keys than loading the parameters does.

    Returns:
      `(key, our value, stored value)` of each.
    """
    fixed = MODEL_KEYS + _TRAINING_KEYS if training else MODEL_KEYS
    tokenizer = stored["tokenizer"]
    has_trained = tokenizer["kind"] == "sentencepiece" and not tokenizer["path"]
    free = _FREE_KEYS if has_trained else (*_FREE_KEYS, _TRAINED_TOKENIZER_KEY)
    return [
        found
        for found in differences(ours, stored)
        if found[0].startswith(fixed) and not found[0].startswith(free)
    ]
