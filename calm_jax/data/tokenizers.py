"""Tokenizers behind one small interface: SentencePiece, Llama 3, plain bytes.

Text never turns into a special token: a document that spells out `<|end_of_text|>` is encoded as
those characters.
"""

import abc
import base64
import binascii
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece
import tiktoken
import tokenizers

from calm_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """`config.tokenizer`; every key is described in `configs/common.py`."""

    kind: str
    path: str
    vocab_size: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise UserError(f"tokenizer.kind={self.kind!r} is none of {', '.join(KINDS)}")
        if self.kind == "bytes" and self.path:
            raise UserError(f"tokenizer.path={self.path!r}: tokenizer.kind='bytes' reads no file")
        if self.kind == "sentencepiece" and not self.path and self.vocab_size < 300:
            raise UserError(
                f"tokenizer.vocab_size={self.vocab_size} must be at least 300: 256 bytes, 4 special tokens and some text"
            )


class Vocabulary(NamedTuple):
    """As much of a tokenizer as a model is made with."""

    vocab_size: int
    pad_id: int


class Tokenizer(abc.ABC):
    """Text to token ids and back. Lossless: `decode(encode(text)) == text` for every valid text.

    model: the bytes that define it, as they are saved in a workdir.
    """

    kind: str
    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int

    def __init__(self, model: bytes):
        self.model = model

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without bos or eos."""

    @abc.abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """Text of ids that are no special tokens; bytes that are no UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """The same as an array, int32."""
        return np.asarray(self.encode_batch([text])[0], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; bos, eos and pad are left out."""
        special = {self.bos_id, self.eos_id, self.pad_id}
        return self._decode_text([int(token) for token in ids if int(token) not in special])

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly when they are the same."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.model).hexdigest()[:16]

    @property
    def description(self) -> dict[str, str | int]:
        """What a reader of its tokens has to know."""
        return {
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes `model` and a description into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model").write_bytes(self.model)
        (folder / "description.json").write_text(json.dumps(self.description, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, then bos, eos and pad."""

    kind = "bytes"
    vocab_size, bos_id, eos_id, pad_id = 259, 256, 257, 258

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def _decode_text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that has bos, eos and pad.

    It writes spaces as U+2581, so that this one character comes back as a space.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        super().__init__(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise UserError("tokenizer: the file is no SentencePiece model") from error
        self.vocab_size = self._processor.get_piece_size()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        self.pad_id = self._processor.pad_id()
        for name in ("bos_id", "eos_id", "pad_id"):
            if getattr(self, name) < 0:
                raise UserError(f"tokenizer: the SentencePiece model has no {name}; CALM needs it")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def _decode_text(self, ids: list[int]) -> str:
        return self._processor.decode(ids)


class Llama3Tokenizer(Tokenizer):
    """Llama 3's byte-level BPE and one added pad token.

    Reads `tokenizer.model` (tiktoken's ranks: a base64 token and its rank on each line) or `tokenizer.json`.
    """

    kind = "llama3"
    _NUM_SPECIAL = 256
    _BOS, _EOS = "<|begin_of_text|>", "<|end_of_text|>"

    def __init__(self, model: bytes):
        super().__init__(model)
        self._bpe: _JsonBpe | _RanksBpe
        if model.lstrip()[:1] == b"{":
            self._read_json(model)
        else:
            self._read_ranks(model)

    def _read_json(self, model: bytes) -> None:
        try:
            bpe = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer: the file is no tokenizer.json ({error})") from error
        for name, token in (("bos_id", self._BOS), ("eos_id", self._EOS)):
            token_id = bpe.token_to_id(token)
            if token_id is None:
                raise UserError(f"tokenizer: tokenizer.json has no {token}, as Llama 3's has")
            setattr(self, name, token_id)
        pad_id = bpe.token_to_id("[PAD]")
        self.pad_id = bpe.get_vocab_size() if pad_id is None else pad_id
        self.vocab_size = max(self.pad_id + 1, bpe.get_vocab_size())
        self._bpe = _JsonBpe(bpe)

    def _read_ranks(self, model: bytes) -> None:
        ranks: dict[bytes, int] = {}
        try:
            for line in io.BytesIO(model):
                if line.strip():
                    token, rank = line.split()
                    ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(
                "tokenizer: the file is neither Llama 3's tiktoken ranks nor a tokenizer.json"
            ) from error
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise UserError("tokenizer: the ranks are not 0, 1, 2, ... without gaps")
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise UserError("tokenizer: the ranks lack some of the 256 single bytes")
        self.bos_id, self.eos_id = len(ranks), len(ranks) + 1
        self.pad_id = len(ranks) + self._NUM_SPECIAL
        self.vocab_size = self.pad_id + 1
        self._bpe = _RanksBpe(ranks)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._bpe.encode_batch(texts)

    def encode_array(self, text: str) -> np.ndarray:
        return self._bpe.encode_array(text)

    def _decode_text(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


class _JsonBpe:
    """What tokenizer.json describes."""

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        bpe.encode_special_tokens = True
        bpe.no_truncation()
        bpe.no_padding()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._bpe.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_array(self, text: str) -> np.ndarray:
        return np.asarray(self._bpe.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


class _RanksBpe:
    """What the ranks describe, by tiktoken: four times as fast as the same BPE in `tokenizers`."""

    # How Llama 3 cuts text into words before BPE (published with its tokenizer).
    _WORDS = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # tiktoken's stack overflows on a million spaces in a row; text is cut behind so many.
    _MOST_SPACES = 100_000
    # Looked for only where a run begins, as every other place would read the run again.
    _LONG_SPACES = re.compile(rf"(?<!\s)\s{{{_MOST_SPACES},}}")

    def __init__(self, ranks: dict[bytes, int]):
        self._num_ranks = len(ranks)
        self._bpe = tiktoken.Encoding(
            "llama3", pat_str=self._WORDS, mergeable_ranks=ranks, special_tokens={}
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if any(len(self._parts(text)) > 1 for text in texts):
            return [self.encode_array(text).tolist() for text in texts]
        return self._bpe.encode_ordinary_batch(list(texts))

    def encode_array(self, text: str) -> np.ndarray:
        parts = [
            self._bpe.encode_to_numpy(part, disallowed_special=()) for part in self._parts(text)
        ]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def _parts(self, text: str) -> list[str]:
        if len(text) < self._MOST_SPACES:
            return [text]
        cuts = [0]
        for match in self._LONG_SPACES.finditer(text):
            first = match.start() + self._MOST_SPACES
            cuts += range(first, match.end() + 1, self._MOST_SPACES)
        return [text[a:b] for a, b in itertools.pairwise([*cuts, len(text)]) if a < b]

    def decode(self, ids: list[int]) -> str:
        return self._bpe.decode([token for token in ids if token < self._num_ranks])


KINDS = {cls.kind: cls for cls in (SentencePieceTokenizer, Llama3Tokenizer, ByteTokenizer)}


# Pad's id in a SentencePiece model that is trained here.
_TRAINED_PAD = 3


def _train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """A lossless BPE model with byte fallback, trained on `texts`."""
    # SentencePiece drops sentences longer than its limit, so documents are handed over in pieces.
    piece = 4000
    pieces = (text[i : i + piece] for text in texts for i in range(0, len(text), piece))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=pieces,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            max_sentence_length=4 * piece,
            character_coverage=0.999,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=_TRAINED_PAD,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size}: SentencePiece cannot train on this corpus ({str(error).splitlines()[-1]})"
        ) from error
    return model.getvalue()


def check_path(config: TokenizerConfig) -> None:
    """Raises `UserError` for a config that names no file where one is needed, as nothing else brings a tokenizer."""
    if config.kind == "llama3" and not config.path:
        raise UserError(
            "tokenizer.path is empty: tokenizer.kind='llama3' needs Llama 3's tokenizer.model (tiktoken ranks) or "
            "tokenizer.json; or choose --config.tokenizer.kind=sentencepiece or bytes"
        )


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that the config describes; `texts` are read only if it is to be trained."""
    check_path(config)
    if config.path:
        try:
            model = pathlib.Path(config.path).read_bytes()
        except OSError as error:
            raise UserError(
                f"tokenizer.path={config.path!r} cannot be read: {error.strerror}"
            ) from error
    elif config.kind == "sentencepiece":
        model = _train_sentencepiece(texts, config.vocab_size)
    else:
        model = b""
    return KINDS[config.kind](model)


def vocabulary(config: TokenizerConfig) -> Vocabulary:
    """What a model needs of the tokenizer that the config describes; without a file that the recipe leaves to be named."""
    if config.kind == "llama3" and not config.path:
        # 128,000 ranks, 256 special tokens and the pad token.
        return Vocabulary(128_257, 128_256)
    if config.kind == "sentencepiece" and not config.path:
        return Vocabulary(config.vocab_size, _TRAINED_PAD)
    tokenizer = make_tokenizer(config, ())
    return Vocabulary(tokenizer.vocab_size, tokenizer.pad_id)


def _config_of_file(path: pathlib.Path) -> TokenizerConfig:
    """What kind a tokenizer's file is, from how it begins."""
    try:
        with open(path, "rb") as file:
            start = file.read(256)
    except OSError as error:
        raise UserError(f"the tokenizer {path} cannot be read: {error.strerror}") from error
    # JSON, or tiktoken's lines of base64 and rank; SentencePiece models are binary.
    is_llama3 = start.lstrip().startswith(b"{") or re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", start)
    return TokenizerConfig("llama3" if is_llama3 else "sentencepiece", str(path), 512)


def open_tokenizer(name: str) -> tuple[Tokenizer, TokenizerConfig]:
    """The tokenizer that `--tokenizer` names: a file, or "bytes"."""
    if name == ByteTokenizer.kind:
        config = TokenizerConfig(name, "", 512)
    elif not os.path.isfile(name):
        raise UserError(f"--tokenizer={name!r} is no file; give one, or 'bytes'")
    else:
        config = _config_of_file(pathlib.Path(name))
    return make_tokenizer(config, ()), config


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
    """Reads what `Tokenizer.save` wrote, and checks that it is whole."""
    try:
        description = json.loads((folder / "description.json").read_text())
        kind, fingerprint = KINDS[description["kind"]], description["fingerprint"]
        tokenizer = kind((folder / "model").read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no readable tokenizer ({error!r})") from error
    except UserError as error:
        raise UserError(f"{folder} is damaged: {error}") from error
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"{folder}/model is damaged: its fingerprint is not the one that was saved")
    return tokenizer
