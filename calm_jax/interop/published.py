"""Published checkpoint folders: `config.json` and safetensors, as Hugging Face lays them out."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from calm_jax.errors import UserError
from calm_jax.heads import HeadConfig
from calm_jax.heads.diffusion import DiffusionHeadConfig
from calm_jax.heads.energy import EnergyHeadConfig
from calm_jax.heads.flow import FlowHeadConfig
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.transformer import TransformerConfig

# `architectures[0]` of config.json tells the kind; `model_type` is never written.
AUTOENCODER, AUTOREGRESSIVE = "Autoencoder", "LlamaForCausalLM"
ENERGY, DIFFUSION, FLOW = "EnergyTransformer", "DiffusionTransformer", "FlowTransformer"

# What the published code hard-codes: the energy loss's target samples, the diffusion sampler's steps,
# the flow's solver and steps.
_NUM_TARGET_SAMPLES, _DIFFUSION_STEPS, _FLOW_STEPS, _FLOW_SOLVER = 100, 100, 10, "midpoint"


class PublishedConfig:
    """The `config.json` of a published checkpoint; a key that it lacks is a `UserError` that names it."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / "config.json"
        try:
            self._values = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self._path} cannot be read ({error})") from error
        if not isinstance(self._values, dict):
            raise UserError(f"{self._path} holds no JSON object")

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            raise UserError(f"{self._path} has no key {key!r}")
        return self._values[key]

    @property
    def architecture(self) -> str:
        return self["architectures"][0]

    def refuse_what_is_not_computed(self) -> None:
        """Raises `UserError` where a key asks for arithmetic that this project does not do."""
        computed = {
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        for key, value in computed.items():
            if self._values.get(key, value) != value:
                raise UserError(
                    f"{self._path}: {key}={self._values[key]!r} is not supported, only {value!r}"
                )

    def autoencoder(self) -> AutoencoderConfig:
        return AutoencoderConfig(
            latent_size=self["latent_size"],
            hidden_size=self["hidden_size"],
            intermediate_size=self["intermediate_size"],
            num_encoder_layers=self["num_encoder_layers"],
            num_decoder_layers=self["num_decoder_layers"],
            norm_epsilon=self["rms_norm_eps"],
            dropout=self["ae_dropout"],
            kl_clamp=self["kl_clamp"],
            kl_weight=self["kl_weight"],
        )

    def transformer(self) -> TransformerConfig:
        return TransformerConfig(
            hidden_size=self["hidden_size"],
            intermediate_size=self["intermediate_size"],
            num_layers=self["num_hidden_layers"],
            num_heads=self["num_attention_heads"],
            num_kv_heads=self["num_key_value_heads"],
            rope_theta=self["rope_theta"],
            norm_epsilon=self["rms_norm_eps"],
            remat=False,
        )

    def head(self) -> HeadConfig:
        """The config of a latent head, with what the published code hard-codes."""
        blocks = self["num_mlp_layers"]
        if self.architecture == ENERGY:
            return EnergyHeadConfig(
                name="energy",
                num_blocks=blocks,
                noise_size=self["noise_size"],
                num_samples=self["num_samples"],
                num_target_samples=_NUM_TARGET_SAMPLES,
                beta=self["beta"],
            )
        samples = self["num_samples"]
        if self.architecture == DIFFUSION:
            return DiffusionHeadConfig("diffusion", blocks, samples, _DIFFUSION_STEPS)
        if self.architecture == FLOW:
            return FlowHeadConfig("flow", blocks, samples, _FLOW_STEPS, _FLOW_SOLVER)
        raise UserError(f"{self._path}: architectures={self['architectures']!r} has no latent head")


def read_tensors(folder: pathlib.Path) -> Mapping[str, np.ndarray]:
    """Every tensor of `folder`/model.safetensors by its published name."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UserError(
            "reading published checkpoints needs safetensors: pip install 'calm_jax[interop]'"
        ) from error
    path = folder / "model.safetensors"
    try:
        return safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
