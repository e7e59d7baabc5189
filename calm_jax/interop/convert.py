"""Converts a published PyTorch checkpoint to a workdir, without PyTorch.

    python -m calm_jax.interop.convert --source=SRC --workdir=DIR [--autoencoder=SRC] [--tokenizer=FILE] [--dry_run]
        [--config.KEY=VALUE ...]

SRC is a folder with config.json and weights, or the name of a repository on the Hugging Face hub (--revision names a
branch, a tag or a commit of it). The workdir can be evaluated, generated from and trained further; its recipe is the
published recipe with the checkpoint's model and the given keys. DIR gets its name only when it is complete.
"""

import time

from absl import app, flags
from ml_collections import config_flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path, refuse_existing
from calm_jax.cli.flags import parse_config_flags
from calm_jax.data.tokenizers import open_tokenizer
from calm_jax.errors import UserError
from configs import ar_m, common

_SOURCE = flags.DEFINE_string(
    "source", "", "folder of a published checkpoint, or owner/name on the hub"
)
_WORKDIR = flags.DEFINE_string("workdir", "", "folder to make")
_AUTOENCODER = flags.DEFINE_string(
    "autoencoder",
    "",
    "the autoencoder's checkpoint, as --source, for a language model that does not include it",
)
_REVISION = flags.DEFINE_string(
    "revision", "", "branch, tag or commit of a --source on the hub; if empty, its main branch"
)
_AUTOENCODER_REVISION = flags.DEFINE_string(
    "autoencoder_revision",
    "",
    "branch, tag or commit of an --autoencoder on the hub; if empty, its main branch",
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    "",
    "tokenizer file, workdir or bytes; by default the tokenizer in the source's folder",
)
_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "print which tensor becomes which parameter, and write nothing"
)


@command
def main(argv: list[str]) -> None:
    if not _SOURCE.value:
        raise UserError("give a published checkpoint: --source=FOLDER or --source=owner/name")
    if not _WORKDIR.value and not _DRY_RUN.value:
        raise UserError("give the folder to make: --workdir=DIR")
    path, began = local_path(_WORKDIR.value, "--workdir"), time.monotonic()
    if _WORKDIR.value:
        refuse_existing(path)
    if _AUTOENCODER_REVISION.value and not _AUTOENCODER.value:
        raise UserError("--autoencoder_revision needs --autoencoder=owner/name")
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.interop.conversion import check_overrides, make_plan
    from calm_jax.interop.converted import convert, print_notes, print_plan
    from calm_jax.interop.source import find_tokenizer, folder_of

    # A wrong key or file is refused before the weights are downloaded.
    overrides = config_flags.get_override_values(flags.FLAGS["config"])
    check_overrides(overrides)
    given = open_tokenizer(_TOKENIZER.value) if _TOKENIZER.value else None
    folder = folder_of(_SOURCE.value, "--source", _REVISION.value)
    autoencoder = (
        folder_of(_AUTOENCODER.value, "--autoencoder", _AUTOENCODER_REVISION.value)
        if _AUTOENCODER.value
        else None
    )
    tokenizer, tokenizer_config = given or find_tokenizer(folder)
    plan = make_plan(
        folder,
        autoencoder,
        tokenizer,
        tokenizer_config,
        {True: common.get_config(), False: ar_m.get_config()},
        overrides,
    )
    if _DRY_RUN.value:
        print_plan(plan)
        print_notes(plan)
        return
    convert(plan, path)
    print_notes(plan)
    seconds = time.monotonic() - began
    print(f"{path} is ready: {plan.num_parameters:,} parameters in {seconds:.1f} s")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_config_flags(common.get_config()))
