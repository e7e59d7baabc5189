"""The interface of a tokenizer, and the byte tokenizer (UTF-8), which needs no model file."""

import abc
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

from calm_jax.cli.files import write_atomically


class Tokenizer(abc.ABC):
    """Text to token ids and back. `decode(encode(text)) == text` for every valid text, but for SentencePiece models that normalise it.

    Attributes:
        kind: the value of `tokenizer.kind` that selects this class.
        model: the bytes that define the tokenizer, as they are saved in a workdir.
        vocab_size: the number of ids, including special tokens.
        bos_id, eos_id, pad_id: the special tokens that CALM uses.
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
        """Text of ids without special tokens; bytes that are not valid UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Token ids of one text, without bos or eos."""
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of one text, int32, without bos or eos."""
        return np.asarray(self.encode_batch([text])[0], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; bos, eos and pad are left out."""
        special = {self.bos_id, self.eos_id, self.pad_id}
        return self._decode_text([int(token) for token in ids if int(token) not in special])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of kind and model: equal exactly for equal tokenizers."""
        return hashlib.sha256(self.kind.encode() + b"\0" + self.model).hexdigest()[:16]

    @property
    def description(self) -> dict[str, str | int]:
        """Kind, fingerprint, vocabulary size and special ids, as saved beside the tokens."""
        return {
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
        }

    def save(self, folder: pathlib.Path) -> None:
        """Writes `model` and `description.json` into `folder`; `load_tokenizer` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "model", self.model)
        write_atomically(folder / "description.json", json.dumps(self.description, indent=2) + "\n")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are ids 0 to 255; bos, eos and pad follow."""

    kind = "bytes"
    vocab_size, bos_id, eos_id, pad_id = 259, 256, 257, 258

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def _decode_text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")
