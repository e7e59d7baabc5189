"""Where a published checkpoint comes from: a folder, or a repository of the Hugging Face hub; and its tokenizer."""

import pathlib
import re

from calm_jax.data.tokenizers import Tokenizer, TokenizerConfig, open_tokenizer
from calm_jax.errors import UserError
from calm_jax.interop.published import PublishedConfig
from calm_jax.interop.weights import is_file

# What tokenizers' files are called, the ones that say most first.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
_DESCRIPTIONS = ["config.json", *_TOKENIZER_FILES]
_SAFETENSORS = ["*.safetensors", "model.safetensors.index.json"]
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def folder_of(source: str, flag: str) -> pathlib.Path:
    """The local folder of a checkpoint, downloaded if it is the hub's. Raises `UserError` if it cannot be had."""
    path = pathlib.Path(source)
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"{flag}={source!r} cannot be looked at ({error})") from error
    if is_folder:
        return path
    if is_there:
        raise UserError(
            f"{flag}={source!r} is a file: give the folder that holds it and config.json"
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise UserError(
            f"{flag}={source!r} is no folder, and no name of a repository such as cccczshao/CALM-M"
        )
    return _download(source, flag)


def _download(name: str, flag: str) -> pathlib.Path:
    """A repository's description and weights, safetensors if it has them; what is there already is not fetched."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{flag}={name!r} is no folder; to download from the hub: pip install 'calm_jax[interop]'"
        ) from error
    try:
        fetched = huggingface_hub.snapshot_download(
            name, allow_patterns=_DESCRIPTIONS + _SAFETENSORS
        )
        if not list(pathlib.Path(fetched).glob("*.safetensors")):
            fetched = huggingface_hub.snapshot_download(
                name, allow_patterns=_DESCRIPTIONS + _PICKLES
            )
    # Errors of the network are those of whichever library the hub's client uses.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{flag}={name!r} is no folder here, and cannot be downloaded from the hub ({type(error).__name__}: {reason}); "
            "without a network, download it elsewhere and give the folder"
        ) from error
    return pathlib.Path(fetched)


def find_tokenizer(name: str, folder: pathlib.Path) -> tuple[Tokenizer, TokenizerConfig]:
    """The tokenizer of `name`: a file, "bytes", or if empty what lies in `folder`."""
    there = [folder / file for file in _TOKENIZER_FILES if is_file(folder / file)]
    if not name and not there:
        raise UserError(
            f"{folder} has no {' or '.join(_TOKENIZER_FILES[:2])}: give the model's tokenizer with --tokenizer=FILE "
            "(the published models': Llama 3's tokenizer.model)"
        )
    return open_tokenizer(name or str(there[0]))


def check_tokenizer(config: PublishedConfig, tokenizer: Tokenizer) -> None:
    """Raises `UserError` unless the tokenizer's ids are the checkpoint's."""
    pairs = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    for key, ours in pairs.items():
        if (key == "vocab_size" or config.has(key)) and config[key] != ours:
            raise UserError(
                f"{config.path} has {key}={config[key]!r}, the tokenizer {ours}: give the one that the model was trained "
                "with, --tokenizer=FILE"
            )
