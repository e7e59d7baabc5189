"""Finds the autoencoder of a published checkpoint, in a folder of its own or inside a language model."""

import dataclasses
import pathlib
import re

from calm_jax.errors import UserError
from calm_jax.interop import names, published
from calm_jax.interop.published import PublishedConfig
from calm_jax.interop.weights import Weights, is_file
from calm_jax.models.autoencoder import AutoencoderConfig


@dataclasses.dataclass(frozen=True)
class SourceAutoencoder:
    """A published autoencoder, whose tensors in `weights` have names that begin with `prefix`."""

    config: AutoencoderConfig
    chunk_size: int
    vocab_size: int
    weights: Weights
    prefix: str

    @property
    def rows(self) -> list[names.Row]:
        return names.prefixed(names.autoencoder_rows(self.config), self.prefix)


def read_autoencoder(folder: pathlib.Path) -> SourceAutoencoder:
    """The autoencoder of a folder of its own."""
    config = PublishedConfig(folder)
    if config.architecture != published.AUTOENCODER:
        raise UserError(f"{config.path} is of kind {config.architecture}, not an autoencoder")
    config.refuse_unsupported()
    return SourceAutoencoder(
        config.autoencoder(),
        config.size("patch_size"),
        config.size("vocab_size"),
        Weights(folder),
        "",
    )


def _included_autoencoder(weights: Weights) -> SourceAutoencoder:
    """The autoencoder inside a language model's checkpoint, its sizes inferred from its tensors' shapes."""

    def shape(name: str) -> tuple[int, ...]:
        prefixed = f"{names.AUTOENCODER_PREFIX}{name}"
        for candidate in filter(None, (prefixed, names.alias(prefixed))):
            if candidate in weights.tensors and len(weights.tensors[candidate].shape) == 2:
                return weights.tensors[candidate].shape
        raise UserError(
            f"{weights.folder} has only a part of an autoencoder: {prefixed} is missing or is no matrix"
        )

    def num_layers(part: str) -> int:
        pattern = re.compile(rf"{names.AUTOENCODER_PREFIX}{part}\.{part}_layers\.(\d{{1,6}})\.")
        return 1 + max(
            (int(match[1]) for match in map(pattern.match, weights.tensors) if match), default=-1
        )

    vocab_size, width = shape("encoder.embed_tokens.weight")
    config = published.inferred_autoencoder(
        latent_size=shape("encoder.hidden_to_latent.weight")[0] // 2,
        hidden_size=width,
        intermediate_size=shape("encoder.encoder_layers.0.mlp.gate_proj.weight")[0],
        num_encoder_layers=num_layers("encoder"),
        num_decoder_layers=num_layers("decoder"),
    )
    chunk_size = shape("encoder.squeeze_layer.weight")[1] // max(1, width)
    return SourceAutoencoder(config, chunk_size, vocab_size, weights, names.AUTOENCODER_PREFIX)


def autoencoder_of(
    config: PublishedConfig, weights: Weights, folder: pathlib.Path | None
) -> SourceAutoencoder:
    """The autoencoder of a language model: from `folder`, else from `ae_path` in config.json, else from inside `weights`.

    A folder is preferred because its config.json has values that the tensors' shapes do not tell. `ae_path` is tried
    beside the weights first. Raises `UserError` if there is no autoencoder, or it does not fit config.json.
    """
    if folder is None and config.has("ae_path"):
        named = pathlib.Path(str(config["ae_path"]))
        for candidate in (weights.folder / named.name, named):
            if is_file(candidate / "config.json") and candidate != weights.folder:
                folder = candidate
                print(f"autoencoder: {str(candidate)!r}, named by ae_path in config.json")
                break
    if folder is not None:
        found = read_autoencoder(folder)
    elif any(name.startswith(names.AUTOENCODER_PREFIX) for name in weights.tensors):
        found = _included_autoencoder(weights)
    else:
        hint = f" (config.json has ae_path={config['ae_path']!r})" if config.has("ae_path") else ""
        raise UserError(
            f"{weights.folder} includes no autoencoder: give it with --autoencoder=SRC{hint}"
        )
    for key, ours in (
        ("patch_size", found.chunk_size),
        ("latent_size", found.config.latent_size),
        ("vocab_size", found.vocab_size),
    ):
        if config.size(key) != ours:
            raise UserError(
                f"{config.path} has {key}={config[key]!r}, but its autoencoder in {found.weights.folder} has {ours}"
            )
    return found
