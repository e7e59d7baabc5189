"""Makes the tokenizer that a config, a flag or a folder names."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from calm_jax.cli.files import local_path, os_errors, read_file, read_json
from calm_jax.data.tokenizers.base import ByteTokenizer, Tokenizer
from calm_jax.data.tokenizers.huggingface import HuggingFaceTokenizer
from calm_jax.data.tokenizers.json_bpe import JsonBpe, is_json
from calm_jax.data.tokenizers.llama3 import Llama3Tokenizer
from calm_jax.data.tokenizers.sentencepiece import (
    LEAST_PIECES,
    TRAINED_PAD,
    SentencePieceTokenizer,
    train_sentencepiece,
)
from calm_jax.errors import UserError, require_one_of

_CLASSES: tuple[type[Tokenizer], ...] = (
    SentencePieceTokenizer,
    Llama3Tokenizer,
    HuggingFaceTokenizer,
    ByteTokenizer,
)
KINDS: dict[str, type[Tokenizer]] = {cls.kind: cls for cls in _CLASSES}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """`config.tokenizer`; every key is described in `configs/common.py`."""

    kind: str
    path: str
    vocab_size: int
    whitespace_pieces: bool

    def __post_init__(self) -> None:
        require_one_of("tokenizer.kind", self.kind, KINDS)
        local_path(self.path, "tokenizer.path")
        if self.kind == "bytes" and self.path:
            raise UserError(f"tokenizer.path={self.path!r}: tokenizer.kind='bytes' reads no file")
        if self.kind == "sentencepiece" and not self.path and self.vocab_size < LEAST_PIECES:
            raise UserError(
                f"tokenizer.vocab_size={self.vocab_size} must be at least {LEAST_PIECES}: 256 bytes, 4 special tokens and some text"
            )


class Vocabulary(NamedTuple):
    """What a model needs to know of its tokenizer: the number of ids, special tokens included, and the id of pad."""

    vocab_size: int
    pad_id: int


def check_path(config: TokenizerConfig) -> None:
    """Raises `UserError` if the configured kind needs a file and `path` is empty."""
    needed = {
        "llama3": "Llama 3's tokenizer.model (tiktoken ranks) or tokenizer.json",
        "huggingface": "a byte-level tokenizer.json",
    }
    if config.kind in needed and not config.path:
        raise UserError(
            f"tokenizer.path is empty: tokenizer.kind={config.kind!r} needs {needed[config.kind]}; or choose "
            "--config.tokenizer.kind=sentencepiece or bytes"
        )


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """Reads or trains the tokenizer that the config describes.

    Args:
        config: the kind, and the file or the vocabulary size.
        texts: the training texts of a SentencePiece model without a file; not read otherwise.

    Raises:
        UserError: the file is missing or not a model of this kind, or the texts are too few to train on.
    """
    check_path(config)
    if config.path:
        with os_errors(f"tokenizer.path={config.path!r}", "read"):
            model = read_file(pathlib.Path(config.path))
    elif config.kind == "sentencepiece":
        model = train_sentencepiece(texts, config.vocab_size, config.whitespace_pieces)
    else:
        model = b""
    return KINDS[config.kind](model)


def vocabulary(config: TokenizerConfig) -> Vocabulary:
    """The vocabulary of the configured tokenizer. It is known even without the file (Llama 3) or training (SentencePiece).

    Raises `UserError` as `make_tokenizer` does, where the file has to be read.
    """
    if config.kind == "llama3" and not config.path:
        # 128,000 ranks, 256 special tokens and the pad token.
        return Vocabulary(128_257, 128_256)
    if config.kind == "sentencepiece" and not config.path:
        return Vocabulary(config.vocab_size, TRAINED_PAD)
    tokenizer = make_tokenizer(config, ())
    return Vocabulary(tokenizer.vocab_size, tokenizer.pad_id)


def _config(kind: str, path: str) -> TokenizerConfig:
    # The last two keys are for a model that is trained.
    return TokenizerConfig(kind, path, 512, True)


def _config_of_file(path: pathlib.Path) -> TokenizerConfig:
    """Tells the kind of a tokenizer's file from its content. Raises `UserError` for JSON that is no tokenizer.json."""
    with os_errors(f"the tokenizer {path}", "read"):
        model = read_file(path)
    if is_json(model):
        bpe = JsonBpe(model)
        is_llama3 = all(bpe.id_of(token) is not None for token in Llama3Tokenizer.TOKENS)
        kind = "llama3" if is_llama3 else "huggingface"
    else:
        # Tiktoken's lines of base64 and rank; SentencePiece models are binary.
        is_llama3 = re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", model) is not None
        kind = "llama3" if is_llama3 else "sentencepiece"
    return _config(kind, str(path))


def open_tokenizer(name: str) -> tuple[Tokenizer, TokenizerConfig]:
    """The tokenizer that the flag `--tokenizer` names (a file, a workdir, or "bytes"), and a config that describes it."""
    model = pathlib.Path(name, "tokenizer", "model")
    if name == ByteTokenizer.kind:
        config = _config(name, "")
    elif os.path.isfile(name):
        config = _config_of_file(pathlib.Path(name))
    elif os.path.isfile(model):
        tokenizer = load_tokenizer(model.parent)
        path = "" if tokenizer.kind == ByteTokenizer.kind else str(model)
        return tokenizer, _config(tokenizer.kind, path)
    else:
        raise UserError(
            f"--tokenizer={name!r} is no file, and no workdir with a tokenizer; give one of them, or 'bytes'"
        )
    return make_tokenizer(config, ()), config


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Reads the files that `Tokenizer.save` wrote. Raises `UserError` if they are missing or damaged."""
    try:
        description = read_json(folder / "description.json")
        kind, fingerprint = KINDS[description["kind"]], description["fingerprint"]
        tokenizer = kind(read_file(folder / "model"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no readable tokenizer ({error!r})") from error
    except UserError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{folder}/model is damaged: its fingerprint is not the one that was saved")
    return tokenizer
