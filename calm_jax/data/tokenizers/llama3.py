"""Llama 3's tokenizer, from either of its two published files."""

import base64
import binascii
import io
import itertools
import re
from collections.abc import Sequence

import numpy as np
import tiktoken
import tokenizers

from calm_jax.data.tokenizers.base import Tokenizer
from calm_jax.errors import UserError

_MOST_IDS = 2**24


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
        # Not the number of tokens, as ids may have gaps.
        num_ids = 1 + max(bpe.get_vocab().values())
        if num_ids > _MOST_IDS:
            raise UserError(
                f"tokenizer: tokenizer.json has the id {num_ids - 1}, above {_MOST_IDS - 1}: the embedding has a row for each id"
            )
        self.pad_id = num_ids if pad_id is None else pad_id
        self.vocab_size = max(self.pad_id + 1, num_ids)
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
    """The BPE of a tokenizer.json, run by `tokenizers`."""

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
    """The BPE of a tokenizer.model, run by tiktoken: four times as fast as the same BPE in `tokenizers`."""

    # How Llama 3 splits text into words before BPE (published with its tokenizer).
    _WORDS = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    # tiktoken's stack overflows on a million spaces in a row, so a run is split after this many.
    _MOST_SPACES = 100_000
    # The lookbehind lets a match begin only where a run begins; otherwise each run would be scanned once per character.
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
