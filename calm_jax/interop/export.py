"""Writes a workdir's model as a checkpoint of the published PyTorch code.

    python -m calm_jax.interop.export --workdir=DIR --target=OUT [--ae_path=PATH]

OUT gets config.json, model.safetensors, the tokenizer's file and README.md, a model card to be completed. The checkpoint of a
CALM model includes its autoencoder, which is also written to OUT/autoencoder: the published code loads it from `ae_path` in
config.json, a path as seen from where that code will run. OUT gets its name only when it is complete.
"""

import time

from absl import app, flags

from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained run")
_TARGET = flags.DEFINE_string("target", "", "folder to make")
_AE_PATH = flags.DEFINE_string(
    "ae_path",
    "",
    "folder where the published code will find the autoencoder; TARGET/autoencoder unless given",
)


@command
def main(argv: list[str]) -> None:
    folder = given_folder(_WORKDIR, "the folder of a trained run")
    target = given_folder(_TARGET, "the folder to make")
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.data.tokenizers import ByteTokenizer
    from calm_jax.interop.exported import AUTOENCODER_FOLDER, export
    from calm_jax.interop.published import not_carried_over
    from calm_jax.run.workdir import Workdir

    workdir = Workdir(folder)
    ae_path = _AE_PATH.value or str(target / AUTOENCODER_FOLDER)
    began = time.monotonic()
    num_parameters = export(workdir, target, ae_path)
    if workdir.has_lm:
        notes = not_carried_over(workdir.config)
    else:
        notes = ["the run has no language model: the autoencoder alone was written"]
    if isinstance(workdir.tokenizer, ByteTokenizer):
        notes.append("the byte tokenizer has no file; convert takes it as --tokenizer=bytes")
    for note in notes:
        print(f"note: {note}")
    print(f"{target} is ready: {num_parameters:,} parameters in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
