"""Reads and writes the `config.json` of published checkpoints."""

import pathlib
from typing import Any

from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError, require_one_of
from calm_jax.interop.weights import read_json
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.heads.diffusion import DiffusionHeadConfig
from calm_jax.models.heads.energy import EnergyHeadConfig
from calm_jax.models.heads.flow import FlowHeadConfig
from calm_jax.models.heads.softmax import SoftmaxHeadConfig
from calm_jax.models.transformer import TransformerConfig

LatentHeadConfig = EnergyHeadConfig | DiffusionHeadConfig | FlowHeadConfig

# The kind of a model is `architectures[0]` in its config.json; the published code does not write `model_type`.
AUTOENCODER, AUTOREGRESSIVE = "Autoencoder", "LlamaForCausalLM"
ENERGY, DIFFUSION, FLOW = "EnergyTransformer", "DiffusionTransformer", "FlowTransformer"
_ARCHITECTURES = (AUTOENCODER, ENERGY, DIFFUSION, FLOW, AUTOREGRESSIVE)
_ARCHITECTURE_OF = {
    "energy": ENERGY,
    "diffusion": DIFFUSION,
    "flow": FLOW,
    "softmax": AUTOREGRESSIVE,
}

# Values that the published code hard-codes: target samples of the energy loss, steps of the diffusion sampler, steps and
# solver of the flow sampler, epsilon of the LayerNorms.
_NUM_TARGET_SAMPLES, _DIFFUSION_STEPS, _FLOW_STEPS, _FLOW_SOLVER = 100, 100, 10, "midpoint"
_LAYER_NORM_EPSILON = 1e-6
# Values in the published autoencoder's config.json, for an autoencoder that comes without one.
_AE_DROPOUT, _KL_CLAMP, _KL_WEIGHT = 0.15, 0.5, 1e-3
# Upper bound on any size in config.json.
_MOST = 2**24


class PublishedConfig:
    """The `config.json` of a published checkpoint.

    `config[key]` is the value of a key, and raises `UserError` if the key is missing.

    Attributes:
      path: the path of the file, for messages.
    """

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "config.json"
        self._values = read_json(self.path)
        if not isinstance(self._values, dict):
            raise UserError(f"{self.path} is not a JSON object")

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise UserError(f"{self.path} has no key {key!r}")
        return self._values[key]

    def has(self, key: str) -> bool:
        """Whether a key has a value other than null."""
        return self._values.get(key) is not None

    def size(self, key: str) -> int:
        """The value of a key that must be a whole number of at least 1."""
        value = self[key]
        if type(value) is not int or not 1 <= value <= _MOST:
            raise UserError(f"{self.path}: {key}={value!r} must be a whole number in [1, {_MOST}]")
        return value

    def number(self, key: str) -> float:
        """The value of a key that must be a finite number."""
        value = self[key]
        # JSON's whole numbers can be too large for a float.
        is_number = type(value) in (int, float) and abs(value) < 1e300
        if not is_number:
            raise UserError(f"{self.path}: {key}={value!r} must be a finite number")
        return float(value)

    @property
    def architecture(self) -> str:
        """The kind of model, one of the names above. Raises `UserError` for any other kind."""
        named = self["architectures"]
        name = named[0] if isinstance(named, list) and named else named
        if name not in _ARCHITECTURES:
            raise UserError(
                f"{self.path}: architectures={named!r} is none of {', '.join(_ARCHITECTURES)}"
            )
        return name

    @property
    def is_tied(self) -> bool:
        """Whether the model is a Llama whose output projection is its embedding."""
        if self.architecture != AUTOREGRESSIVE or not self.has("tie_word_embeddings"):
            # Hugging Face leaves out keys that have their default, which is untied for Llama.
            return False
        value = self["tie_word_embeddings"]
        if type(value) is not bool:
            raise UserError(f"{self.path}: tie_word_embeddings={value!r} must be true or false")
        return value

    def refuse_unsupported(self) -> None:
        """Raises `UserError` if a key asks for a variant of the architecture that this project does not have."""
        supported: dict[str, Any] = {
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
        }
        if self.architecture != AUTOREGRESSIVE:
            supported["tie_word_embeddings"] = False
        if self.has("head_dim"):
            supported["head_dim"] = self.size("hidden_size") // self.size("num_attention_heads")
        for key, value in supported.items():
            if self._values.get(key, value) != value:
                raise UserError(
                    f"{self.path}: {key}={self._values[key]!r} is not supported, only {value!r}"
                )

    def autoencoder(self) -> AutoencoderConfig:
        """The config of an autoencoder."""
        return AutoencoderConfig(
            latent_size=self.size("latent_size"),
            hidden_size=self.size("hidden_size"),
            intermediate_size=self.size("intermediate_size"),
            num_encoder_layers=self.size("num_encoder_layers"),
            num_decoder_layers=self.size("num_decoder_layers"),
            norm_epsilon=self.number("rms_norm_eps"),
            dropout=self.number("ae_dropout"),
            kl_clamp=self.number("kl_clamp"),
            kl_weight=self.number("kl_weight"),
        )

    def transformer(self) -> TransformerConfig:
        """The config of a language model's transformer; `remat` and `attention` have the recipes' defaults."""
        return TransformerConfig(
            hidden_size=self.size("hidden_size"),
            intermediate_size=self.size("intermediate_size"),
            num_layers=self.size("num_hidden_layers"),
            num_heads=self.size("num_attention_heads"),
            num_kv_heads=self.size("num_key_value_heads"),
            rope_theta=self._rope_theta(),
            rms_norm_epsilon=self.number("rms_norm_eps"),
            # The published code hard-codes the epsilon of its LayerNorms.
            norm_epsilon=_LAYER_NORM_EPSILON,
            remat="auto",
            attention="auto",
        )

    def _rope_theta(self) -> float:
        """The base of the rotary frequencies.

        Newer versions of transformers store it in `rope_parameters`, with or without a copy in `rope_theta`.
        """
        if not self.has("rope_parameters"):
            return self.number("rope_theta")
        parameters = self["rope_parameters"]
        theta: Any = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        expected = self["rope_theta"] if self.has("rope_theta") else theta
        plain = {"rope_type": "default", "rope_theta": expected}
        if type(theta) not in (int, float) or plain | parameters != plain:
            raise UserError(f"{self.path}: rope_parameters={parameters!r} is not supported")
        return float(theta)

    def head(self) -> LatentHeadConfig:
        """The config of a latent head, completed by the values that the published code hard-codes."""
        blocks, samples = self.size("num_mlp_layers"), self.size("num_samples")
        if self.architecture == ENERGY:
            return EnergyHeadConfig(
                name="energy",
                num_blocks=blocks,
                noise_size=self.size("noise_size"),
                num_samples=samples,
                num_target_samples=_NUM_TARGET_SAMPLES,
                beta=self.number("beta"),
            )
        if self.architecture == DIFFUSION:
            return DiffusionHeadConfig("diffusion", blocks, samples, _DIFFUSION_STEPS)
        if self.architecture == FLOW:
            return FlowHeadConfig("flow", blocks, samples, _FLOW_STEPS, _FLOW_SOLVER)
        raise UserError(f"{self.path}: architectures={self['architectures']!r} has no latent head")


def inferred_autoencoder(
    *,
    latent_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_encoder_layers: int,
    num_decoder_layers: int,
) -> AutoencoderConfig:
    """The config of an autoencoder without config.json: sizes from its tensors' shapes, all other values as published."""
    return AutoencoderConfig(
        latent_size=latent_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_encoder_layers=num_encoder_layers,
        num_decoder_layers=num_decoder_layers,
        norm_epsilon=_LAYER_NORM_EPSILON,
        dropout=_AE_DROPOUT,
        kl_clamp=_KL_CLAMP,
        kl_weight=_KL_WEIGHT,
    )


def _common_values(architecture: str, tokenizer: Tokenizer, norm_epsilon: float) -> dict[str, Any]:
    """The keys of config.json that every kind of model has."""
    return {
        "architectures": [architecture],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pad_token_id": tokenizer.pad_id,
        "pretraining_tp": 1,
        "rms_norm_eps": norm_epsilon,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.43.0",
        "vocab_size": tokenizer.vocab_size,
    }


def autoencoder_values(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of the published `config.json` for a recipe's autoencoder."""
    model = config.autoencoder.model
    return _common_values(AUTOENCODER, tokenizer, model.norm_epsilon) | {
        "ae_dropout": model.dropout,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "kl_clamp": model.kl_clamp,
        "kl_weight": model.kl_weight,
        "latent_size": model.latent_size,
        "max_position_embeddings": config.autoencoder.data.block_tokens,
        "num_decoder_layers": model.num_decoder_layers,
        "num_encoder_layers": model.num_encoder_layers,
        "patch_size": config.chunk_size,
    }


def lm_values(config: Config, tokenizer: Tokenizer, ae_path: str) -> dict[str, Any]:
    """The content of the published `config.json` for a recipe's language model.

    Args:
      config: the recipe.
      tokenizer: its tokenizer.
      ae_path: folder of the autoencoder, as seen from where the published code will run; not used for a softmax head.

    Raises:
      UserError: if the published code hard-codes another value for a key of the recipe.
    """
    body, head = config.lm.model, config.lm.head
    require_one_of("lm.head.name", head.name, _ARCHITECTURE_OF)
    architecture = _ARCHITECTURE_OF[head.name]
    values = _common_values(architecture, tokenizer, body.rms_norm_epsilon) | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        # Positions count chunks.
        "max_position_embeddings": config.max_chunks,
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "rope_scaling": None,
        "rope_theta": body.rope_theta,
        "use_cache": True,
    }
    if isinstance(head, SoftmaxHeadConfig):
        return values | {"model_type": "llama"}
    _refuse_unlike_hard_coded(config)
    # Published diffusion and flow models have these two keys of the energy head, too, with its defaults.
    beta, noise_size = (
        (head.beta, head.noise_size) if isinstance(head, EnergyHeadConfig) else (1.0, 64)
    )
    return values | {
        "ae_path": ae_path,
        "beta": beta,
        "latent_size": config.autoencoder.model.latent_size,
        "noise_size": noise_size,
        "num_mlp_layers": head.num_blocks,
        "num_samples": head.num_samples,
        "patch_size": config.chunk_size,
    }


def _refuse_unlike_hard_coded(config: Config) -> None:
    """Raises `UserError` if a key of the recipe differs from the value that the published code hard-codes."""
    head = config.lm.head
    fixed: dict[str, tuple[Any, Any]] = {
        "lm.model.norm_epsilon": (config.lm.model.norm_epsilon, _LAYER_NORM_EPSILON)
    }
    if isinstance(head, DiffusionHeadConfig):
        fixed["lm.head.num_steps"] = (head.num_steps, _DIFFUSION_STEPS)
    for key, (ours, published) in fixed.items():
        if ours != published:
            way_out = (
                f"; to export the model with {published!r}, change the key in the workdir's config.json"
                if key.startswith("lm.head.")
                else ""
            )
            raise UserError(
                f"{key}={ours!r} cannot be exported: the published code hard-codes {published!r}{way_out}"
            )


def not_carried_over(config: Config) -> list[str]:
    """Notes on what the published code does in another way: losses, drawing from a flow head, and the token prior in decoding."""
    lm, notes = config.lm, []
    if isinstance(lm.head, EnergyHeadConfig) and lm.head.num_target_samples != _NUM_TARGET_SAMPLES:
        notes.append(
            f"lm.head.num_target_samples={lm.head.num_target_samples}: the published code trains with {_NUM_TARGET_SAMPLES}"
        )
    if isinstance(lm.head, FlowHeadConfig):
        solver, num_steps = lm.head.solver, lm.head.num_steps
        if (solver, num_steps) != (_FLOW_SOLVER, _FLOW_STEPS):
            notes.append(
                f"lm.head.solver={solver!r} and lm.head.num_steps={num_steps}: the published code draws by {_FLOW_SOLVER!r} in "
                f"{_FLOW_STEPS} steps"
            )
    if lm.token_loss_weight:
        notes.append(
            f"lm.token_loss_weight={lm.token_loss_weight}: the token predictor, which the published code does not have, is left out"
        )
    if lm.token_prior_weight:
        notes.append(
            f"lm.token_prior_weight={lm.token_prior_weight}: the published code decodes without the token predictor, so its text "
            "and its scores are worse than those of the model in calm_jax"
        )
    return notes
