"""Finds a published checkpoint, in a folder or on the Hugging Face hub, and its tokenizer."""

import pathlib
import re

from calm_jax.data.tokenizers import Tokenizer, TokenizerConfig, open_tokenizer
from calm_jax.errors import UserError, installation, typed_reason_of
from calm_jax.interop.published import PublishedConfig
from calm_jax.interop.weights import is_file

# Files of tokenizers, in the order in which they are looked for.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
_DESCRIPTIONS = ["config.json", *_TOKENIZER_FILES]
_SAFETENSORS = ["*.safetensors", "model.safetensors.index.json"]
_PICKLES = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def folder_of(source: str, flag: str, revision: str = "") -> pathlib.Path:
    """The local folder of a checkpoint.

    Args:
      source: a folder, or the name `owner/name` of a repository of the Hugging Face hub, which is downloaded.
      flag: the command's flag that `source` comes from, for messages.
      revision: a branch, a tag or a commit of the repository; its main branch if empty.

    Raises:
      UserError: if `source` is neither, or cannot be downloaded, or is a folder and has a revision, or is a workdir.
    """
    path = pathlib.Path(source)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"{flag}={source!r} cannot be opened ({error})") from error
    if is_folder and revision:
        raise UserError(f"{flag}={source!r} is a folder, which has no revision {revision!r}")
    if is_folder and is_file(path / "tokenizer" / "model"):
        raise UserError(
            f"{flag}={source!r} is a workdir of calm_jax, which needs no conversion: name it where a command takes a workdir"
        )
    if is_folder:
        return path
    if exists:
        raise UserError(
            f"{flag}={source!r} is a file: give the folder that holds it and config.json"
        )
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", source):
        raise UserError(
            f"{flag}={source!r} is neither a folder nor the name of a repository, such as cccczshao/CALM-M"
        )
    return _download(source, flag, revision)


def _download(name: str, flag: str, revision: str) -> pathlib.Path:
    """The folder of a repository's config.json, tokenizer and weights; pickled weights only if it has no safetensors.

    Files that an earlier call downloaded are taken from the hub's cache.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{flag}={name!r} is not a folder; to download from the hub: {installation('interop')}"
        ) from error
    try:
        fetched = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=_DESCRIPTIONS + _SAFETENSORS
        )
        if not list(pathlib.Path(fetched).glob("*.safetensors")):
            fetched = huggingface_hub.snapshot_download(
                name, revision=revision or None, allow_patterns=_DESCRIPTIONS + _PICKLES
            )
    # The exceptions of a failed download depend on the HTTP library that the hub's client uses.
    except Exception as error:
        at = f" at revision {revision!r}" if revision else ""
        raise UserError(
            f"{flag}={name!r}{at} is not a folder, and cannot be downloaded from the hub: check the name, or without a "
            f"network download it elsewhere and give the folder ({typed_reason_of(error)})"
        ) from error
    return pathlib.Path(fetched)


def find_tokenizer(folder: pathlib.Path) -> tuple[Tokenizer, TokenizerConfig]:
    """Opens the tokenizer in a checkpoint's folder. Raises `UserError` if there is none."""
    found = [folder / file for file in _TOKENIZER_FILES if is_file(folder / file)]
    if not found:
        raise UserError(
            f"{folder} has no {' or '.join(_TOKENIZER_FILES[:2])}: give the model's tokenizer with --tokenizer=FILE "
            "(the published models': Llama 3's tokenizer.model)"
        )
    return open_tokenizer(str(found[0]))


def check_tokenizer(config: PublishedConfig, tokenizer: Tokenizer) -> None:
    """Raises `UserError` unless the tokenizer has the vocabulary size and the special ids of config.json."""
    if config["vocab_size"] == tokenizer.pad_id == tokenizer.vocab_size - 1:
        raise UserError(
            f"{config.path} has vocab_size={config['vocab_size']!r}, the tokenizer {tokenizer.vocab_size} with the pad token: the "
            "model's vocabulary has no pad token, which calm_jax needs; only models of the published code, whose vocabulary "
            "has one, can be converted"
        )
    pairs = {
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    for key, ours in pairs.items():
        if (key == "vocab_size" or config.has(key)) and config[key] != ours:
            raise UserError(
                f"{config.path} has {key}={config[key]!r}, the tokenizer {ours}: give the tokenizer that the model was trained "
                "with, --tokenizer=FILE"
            )
