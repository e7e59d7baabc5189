"""`BpeTokenizer`, and the tokenizer.json of Hugging Face, run by the library `tokenizers`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tokenizers

from calm_jax.data.tokenizers.base import Tokenizer
from calm_jax.errors import UserError

_MOST_IDS = 2**24


def is_json(model: bytes) -> bool:
    """Whether a tokenizer's file is JSON. Tiktoken's ranks and SentencePiece models begin with other bytes."""
    return model.lstrip()[:1] == b"{"


class Bpe(Protocol):
    """Text to ids and back, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_array(self, text: str) -> np.ndarray: ...

    def decode(self, ids: list[int]) -> str: ...


class BpeTokenizer(Tokenizer):
    """A tokenizer whose text goes through a `Bpe`, which its constructor sets."""

    _bpe: Bpe

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._bpe.encode_batch(texts)

    def encode_array(self, text: str) -> np.ndarray:
        return self._bpe.encode_array(text)

    def _decode_text(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


class JsonBpe:
    """A tokenizer.json: its tokens, and text to ids and back.

    Attributes:
        bpe: the library's object.
        num_ids: the largest id and one. Not the number of tokens, as ids may have gaps.
    """

    def __init__(self, model: bytes):
        """Reads the bytes of a tokenizer.json. Raises `UserError` if they are none, or if an id is too large."""
        try:
            bpe = tokenizers.Tokenizer.from_str(model.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer: the file is no tokenizer.json ({error})") from error
        self.num_ids = 1 + max(bpe.get_vocab().values(), default=-1)
        if self.num_ids > _MOST_IDS:
            raise UserError(
                f"tokenizer: tokenizer.json has the id {self.num_ids - 1}, above {_MOST_IDS - 1}: the embedding has a row for "
                "each id"
            )
        self.bpe = bpe
        bpe.encode_special_tokens = True
        bpe.no_truncation()
        bpe.no_padding()

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if the file does not have it."""
        return self.bpe.token_to_id(token)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.bpe.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_array(self, text: str) -> np.ndarray:
        return np.asarray(self.bpe.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: list[int]) -> str:
        return self.bpe.decode(ids)
