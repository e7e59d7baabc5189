"""The `config.json` of published checkpoints, as Hugging Face lays them out: read and written."""

import pathlib
from typing import Any

from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer
from calm_jax.errors import UserError
from calm_jax.heads import HeadConfig
from calm_jax.heads.diffusion import DiffusionHeadConfig
from calm_jax.heads.energy import EnergyHeadConfig
from calm_jax.heads.flow import FlowHeadConfig
from calm_jax.interop.weights import read_json
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.transformer import TransformerConfig

# `architectures[0]` of config.json tells the kind; `model_type` is never written.
AUTOENCODER, AUTOREGRESSIVE = "Autoencoder", "LlamaForCausalLM"
ENERGY, DIFFUSION, FLOW = "EnergyTransformer", "DiffusionTransformer", "FlowTransformer"
_ARCHITECTURES = (AUTOENCODER, ENERGY, DIFFUSION, FLOW, AUTOREGRESSIVE)
_ARCHITECTURE_OF = {
    "energy": ENERGY,
    "diffusion": DIFFUSION,
    "flow": FLOW,
    "softmax": AUTOREGRESSIVE,
}

# What the published code hard-codes: the energy loss's target samples, the diffusion sampler's steps, the
# flow's solver and steps, the LayerNorms' epsilon, the size of the noise of heads that have no such key.
_NUM_TARGET_SAMPLES, _DIFFUSION_STEPS, _FLOW_STEPS, _FLOW_SOLVER = 100, 100, 10, "midpoint"
_LAYER_NORM_EPSILON = 1e-6
# What the published autoencoder's config.json says, for one that comes without its own.
_AE_DROPOUT, _KL_CLAMP, _KL_WEIGHT = 0.15, 0.5, 1e-3
# No size of a model is larger.
_MOST = 2**24


class PublishedConfig:
    """The `config.json` of a published checkpoint; a key that it lacks is a `UserError` that names it."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / "config.json"
        self._values = read_json(self.path)
        if not isinstance(self._values, dict):
            raise UserError(f"{self.path} holds no JSON object")

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise UserError(f"{self.path} has no key {key!r}")
        return self._values[key]

    def has(self, key: str) -> bool:
        """Whether a key is there with a value."""
        return self._values.get(key) is not None

    def size(self, key: str) -> int:
        """A whole number that counts something."""
        value = self[key]
        if type(value) is not int or not 1 <= value <= _MOST:
            raise UserError(f"{self.path}: {key}={value!r} must be a whole number in [1, {_MOST}]")
        return value

    def number(self, key: str) -> float:
        value = self[key]
        # Whole numbers have no infinity, but may be too large for a float.
        is_number = type(value) in (int, float) and abs(value) < 1e300
        if not is_number:
            raise UserError(f"{self.path}: {key}={value!r} must be a finite number")
        return float(value)

    @property
    def architecture(self) -> str:
        named = self["architectures"]
        name = named[0] if isinstance(named, list) and named else named
        if name not in _ARCHITECTURES:
            raise UserError(
                f"{self.path}: architectures={named!r} is none of {', '.join(_ARCHITECTURES)}"
            )
        return name

    @property
    def is_tied(self) -> bool:
        """Whether a Llama's output is its embedding."""
        if self.architecture != AUTOREGRESSIVE or not self.has("tie_word_embeddings"):
            # Hugging Face leaves out what is a class's default, and Llama's is untied.
            return False
        value = self["tie_word_embeddings"]
        if type(value) is not bool:
            raise UserError(f"{self.path}: tie_word_embeddings={value!r} must be true or false")
        return value

    def refuse_what_is_not_computed(self) -> None:
        """Raises `UserError` where a key asks for arithmetic that this project does not do."""
        computed = {
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
        }
        if self.architecture != AUTOREGRESSIVE:
            computed["tie_word_embeddings"] = False
        if self.architecture in (ENERGY, DIFFUSION, FLOW):
            # Their LayerNorms have this one whatever the key says, which is for the other norms.
            computed["rms_norm_eps"] = _LAYER_NORM_EPSILON
        if self.has("head_dim"):
            computed["head_dim"] = self.size("hidden_size") // self.size("num_attention_heads")
        for key, value in computed.items():
            if self._values.get(key, value) != value:
                raise UserError(
                    f"{self.path}: {key}={self._values[key]!r} is not supported, only {value!r}"
                )

    def autoencoder(self) -> AutoencoderConfig:
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
        return TransformerConfig(
            hidden_size=self.size("hidden_size"),
            intermediate_size=self.size("intermediate_size"),
            num_layers=self.size("num_hidden_layers"),
            num_heads=self.size("num_attention_heads"),
            num_kv_heads=self.size("num_key_value_heads"),
            rope_theta=self._rope_theta(),
            norm_epsilon=self.number("rms_norm_eps"),
            remat="none",
            attention="auto",
        )

    def _rope_theta(self) -> float:
        """Newer transformers write `rope_parameters` in its place, or beside it."""
        if not self.has("rope_parameters"):
            return self.number("rope_theta")
        parameters = self["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": self._values.get("rope_theta")}
        theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        if plain["rope_theta"] is None:
            plain["rope_theta"] = theta
        if type(theta) not in (int, float) or plain | parameters != plain:
            raise UserError(f"{self.path}: rope_parameters={parameters!r} is not supported")
        return float(theta)

    def head(self) -> HeadConfig:
        """The config of a latent head, with what the published code hard-codes."""
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
    """The config of an autoencoder of which only tensors are known: what they do not tell is as published."""
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


def _common(architecture: str, tokenizer: Tokenizer, norm_epsilon: float) -> dict[str, Any]:
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
    """The published `config.json` of a config's autoencoder."""
    model = config.autoencoder.model
    return _common(AUTOENCODER, tokenizer, model.norm_epsilon) | {
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
    """The published `config.json` of a config's language model.

    ae_path: where its code finds the autoencoder. Raises `UserError` that names what it cannot express.
    """
    body, head = config.lm.model, config.lm.head
    architecture = _ARCHITECTURE_OF[head.name]
    values = _common(architecture, tokenizer, body.norm_epsilon) | {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        # Positions count chunks.
        "max_position_embeddings": config.lm.data.block_tokens // config.chunk_size,
        "num_attention_heads": body.num_heads,
        "num_hidden_layers": body.num_layers,
        "num_key_value_heads": body.num_kv_heads,
        "rope_scaling": None,
        "rope_theta": body.rope_theta,
        "use_cache": True,
    }
    if not config.has_autoencoder:
        return values | {"model_type": "llama"}
    _refuse_what_is_hard_coded(config)
    is_energy = architecture == ENERGY
    return values | {
        "ae_path": ae_path,
        "beta": head.beta if is_energy else 1.0,
        "latent_size": config.autoencoder.model.latent_size,
        "noise_size": head.noise_size if is_energy else 64,
        "num_mlp_layers": head.num_blocks,
        "num_samples": head.num_samples,
        "patch_size": config.chunk_size,
    }


def _refuse_what_is_hard_coded(config: Config) -> None:
    """Raises `UserError` for a model that the published code would compute in another way."""
    head = config.lm.head
    fixed = {"lm.model.norm_epsilon": (config.lm.model.norm_epsilon, _LAYER_NORM_EPSILON)}
    if head.name == "diffusion":
        fixed["lm.head.num_steps"] = (head.num_steps, _DIFFUSION_STEPS)
    if head.name == "flow":
        fixed["lm.head.num_steps"] = (head.num_steps, _FLOW_STEPS)
        fixed["lm.head.solver"] = (head.solver, _FLOW_SOLVER)
    for key, (ours, published) in fixed.items():
        if ours != published:
            way_out = (
                "; to export it as one that is, change the key in the workdir's config.json"
                if key.startswith("lm.head.")
                else ""
            )
            raise UserError(
                f"{key}={ours!r} cannot be expressed: the published code has {published!r} built in{way_out}"
            )


def not_carried_over(config: Config) -> list[str]:
    """What only training looks at and the published code has built in: it would go on with its own."""
    head = config.lm.head
    if head.name == "energy" and head.num_target_samples != _NUM_TARGET_SAMPLES:
        return [
            f"lm.head.num_target_samples={head.num_target_samples}: the published code trains with {_NUM_TARGET_SAMPLES}"
        ]
    return []
