"""Writes a workdir's model as the published PyTorch code lays it out.

    python -m calm_jax.interop.export --workdir=DIR --target=OUT [--ae_path=PATH]

OUT gets config.json, model.safetensors and the tokenizer's file. A language model over latents carries its
autoencoder inside, and once more in OUT/autoencoder, where the published code looks for it: `ae_path` in
config.json, a path from where that code will run. OUT appears under its name only when it is whole.
"""

import json
import pathlib
import time
from typing import Any

import flax.traverse_util
import jax
import numpy as np
from absl import app, flags

from calm_jax import checkpoint
from calm_jax.atomic import beside
from calm_jax.command import command, parse_flags
from calm_jax.data.tokenizers import ByteTokenizer, Llama3Tokenizer, Tokenizer
from calm_jax.errors import UserError
from calm_jax.interop import names, published
from calm_jax.mesh import MeshConfig, make_mesh
from calm_jax.tasks import AutoencoderTask, LmTask
from calm_jax.workdir import Workdir, make_autoencoder_task, make_lm_task

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained run")
_TARGET = flags.DEFINE_string("target", "", "folder to make")
_AE_PATH = flags.DEFINE_string(
    "ae_path",
    "",
    "where the published code will find the autoencoder; TARGET/autoencoder unless given",
)
_AUTOENCODER_FOLDER = "autoencoder"


def _tensors(
    rows: list[names.Row], workdir: Workdir, stage: str, task: AutoencoderTask | LmTask
) -> dict[str, np.ndarray]:
    """A stage's published tensors. Each parameter is let go when its tensors are made."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    flat = flax.traverse_util.flatten_dict(workdir.load_params(stage, task, mesh), sep="/")
    tensors = {}
    for row in rows:
        for name, tensor in names.write_parameter(row, np.asarray(flat.pop(row.parameter))):
            tensors[name] = np.ascontiguousarray(tensor)
    return tensors


def _write(folder: pathlib.Path, values: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise UserError("writing needs safetensors: pip install 'calm_jax[interop]'") from error
    try:
        # "pt" is what Hugging Face's loader asks for.
        safetensors.numpy.save_file(
            names.with_twins(tensors), folder / "model.safetensors", metadata={"format": "pt"}
        )
    except safetensors.SafetensorError as error:
        raise UserError(f"{folder}/model.safetensors cannot be written ({error})") from error
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _write_tokenizer(folder: pathlib.Path, tokenizer: Tokenizer) -> None:
    if isinstance(tokenizer, ByteTokenizer):
        print("note: the byte tokenizer has no file; convert takes it as --tokenizer=bytes")
        return
    is_json = isinstance(tokenizer, Llama3Tokenizer) and tokenizer.model.lstrip()[:1] == b"{"
    name = "tokenizer.json" if is_json else "tokenizer.model"
    (folder / name).write_bytes(tokenizer.model)


def export(workdir: Workdir, target: pathlib.Path, ae_path: str) -> int:
    """Writes what a workdir has trained, the language model if there is one; the number of its parameters.

    Raises `UserError` for what the published code cannot express, before anything is read.
    """
    config, tokenizer = workdir.config, workdir.tokenizer
    has_lm = checkpoint.latest_step(workdir.checkpoints("lm")) is not None
    if not has_lm and checkpoint.latest_step(workdir.checkpoints("autoencoder")) is None:
        raise UserError(f"{workdir.path} holds no trained model: train first")
    values = (
        published.lm_values(config, tokenizer, ae_path)
        if has_lm
        else published.autoencoder_values(config, tokenizer)
    )
    inside: dict[str, np.ndarray] = {}
    with beside(target) as folder:
        if config.has_autoencoder:
            task = make_autoencoder_task(config, tokenizer)
            rows = names.autoencoder_rows(config.autoencoder.model)
            tensors = _tensors(rows, workdir, "autoencoder", task)
            own = folder / _AUTOENCODER_FOLDER if has_lm else folder
            own.mkdir(exist_ok=True)
            _write(own, published.autoencoder_values(config, tokenizer), tensors)
            _write_tokenizer(own, tokenizer)
            inside = {
                f"{names.AUTOENCODER_PREFIX}{name}": tensor for name, tensor in tensors.items()
            }
        if has_lm:
            task = make_lm_task(config, tokenizer, config.eval.published)
            rows = (
                names.calm_rows(config.lm.model, config.lm.head)
                if config.has_autoencoder
                else names.autoregressive_rows(config.lm.model, tied=False)
            )
            inside |= _tensors(rows, workdir, "lm", task)
            _write(folder, values, inside)
            _write_tokenizer(folder, tokenizer)
    return sum(tensor.size for tensor in inside.values())


@command
def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}")
    if not _WORKDIR.value or not _TARGET.value:
        raise UserError("give the run and the folder to make: --workdir=DIR --target=OUT")
    workdir, target = Workdir(pathlib.Path(_WORKDIR.value)), pathlib.Path(_TARGET.value)
    ae_path = _AE_PATH.value or str(target / _AUTOENCODER_FOLDER)
    began = time.monotonic()
    num_parameters = export(workdir, target, ae_path)
    for note in published.not_carried_over(workdir.config):
        print(f"note: {note}")
    print(f"{target} is ready: {num_parameters:,} parameters in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
