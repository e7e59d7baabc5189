"""Writes the model of a workdir as a checkpoint of the published PyTorch code."""

import importlib.util
import json
import pathlib
import shutil
from typing import Any

import flax.traverse_util
import jax
import numpy as np

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.cli.files import atomic_folder
from calm_jax.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Llama3Tokenizer,
    Tokenizer,
)
from calm_jax.data.tokenizers.json_bpe import is_json
from calm_jax.errors import UserError, installation
from calm_jax.interop import names, published
from calm_jax.interop.model_card import model_card
from calm_jax.models.heads.softmax import SoftmaxHeadConfig
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run.workdir import Workdir
from calm_jax.tasks import AutoencoderTask, LmTask

# The subfolder of an exported language model that holds its autoencoder.
AUTOENCODER_FOLDER = "autoencoder"


def _tensors(
    rows: list[names.Row], workdir: Workdir, stage: str, task: AutoencoderTask | LmTask
) -> dict[str, np.ndarray]:
    """A stage's published tensors, by name. Each parameter is released once its tensors are copied."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    flat = flax.traverse_util.flatten_dict(workdir.load_params(stage, task, mesh), sep="/")
    tensors = {}
    for row in rows:
        for name, tensor in names.write_parameter(row, np.asarray(flat.pop(row.parameter))):
            tensors[name] = np.ascontiguousarray(tensor)
    return tensors


def _write(folder: pathlib.Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors."""
    import safetensors.numpy

    config, weights = folder / "config.json", folder / "model.safetensors"
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    config.write_text(text, encoding="utf-8")
    try:
        # Hugging Face's loader requires this metadata.
        safetensors.numpy.save_file(names.with_aliases(tensors), weights, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise UserError(f"{weights} cannot be written ({error})") from error
    # safetensors makes a file that only its owner can read.
    shutil.copymode(config, weights)


def _write_tokenizer(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Writes the tokenizer's file. The byte tokenizer has none."""
    if isinstance(tokenizer, ByteTokenizer):
        return
    may_be_json = isinstance(tokenizer, Llama3Tokenizer | HuggingFaceTokenizer)
    name = "tokenizer.json" if may_be_json and is_json(tokenizer.model) else "tokenizer.model"
    (folder / name).write_bytes(tokenizer.model)


def export(workdir: Workdir, target: pathlib.Path, ae_path: str) -> int:
    """Writes the model of a workdir: the language model if it is trained, else the autoencoder.

    Args:
      workdir: the workdir of the trained model.
      target: folder to make.
      ae_path: folder of the autoencoder, as seen from where the published code will run.

    Returns:
      The number of parameters, including those of the autoencoder.

    Raises:
      UserError: if no stage is trained, the published code hard-codes another value for a key of the recipe (this is
        checked before any parameter is read), `target` exists, or writing fails.
    """
    config, tokenizer = workdir.config, workdir.tokenizer
    has_lm = workdir.has_lm
    if not has_lm and not workdir.has_checkpoint("autoencoder"):
        raise UserError(f"{workdir.path} holds no trained model: train first")
    values = (
        published.lm_values(config, tokenizer, ae_path)
        if has_lm
        else published.autoencoder_values(config, tokenizer)
    )
    # What the end of the export needs is checked before parameters are read.
    if importlib.util.find_spec("safetensors") is None:
        raise UserError(f"writing needs safetensors: {installation('interop')}")
    if not workdir.is_converted:
        workdir.stored_corpus()
    written: dict[str, np.ndarray] = {}
    with atomic_folder(target, "--target") as folder:
        if config.has_autoencoder:
            autoencoder = make_autoencoder_task(config, tokenizer)
            rows = names.autoencoder_rows(config.autoencoder.model)
            tensors = _tensors(rows, workdir, "autoencoder", autoencoder)
            own = folder / AUTOENCODER_FOLDER if has_lm else folder
            own.mkdir(exist_ok=True)
            _write(own, published.autoencoder_values(config, tokenizer), tensors)
            _write_tokenizer(own, tokenizer)
            written = {
                f"{names.AUTOENCODER_PREFIX}{name}": tensor for name, tensor in tensors.items()
            }
        if has_lm:
            lm = make_lm_task(config, tokenizer)
            rows = (
                names.autoregressive_rows(config.lm.model, tied=False)
                if isinstance(config.lm.head, SoftmaxHeadConfig)
                else names.calm_rows(config.lm.model, config.lm.head)
            )
            written |= _tensors(rows, workdir, "lm", lm)
            _write(folder, values, written)
            _write_tokenizer(folder, tokenizer)
        num_parameters = sum(tensor.size for tensor in written.values())
        card = model_card(workdir, has_lm, num_parameters, target.name)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return num_parameters
