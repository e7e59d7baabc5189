"""Any byte-level tokenizer.json of Hugging Face, such as GPT-2's or Qwen's."""

from collections.abc import Sequence

import tokenizers

from calm_jax.data.tokenizers.json_bpe import BpeTokenizer, JsonBpe
from calm_jax.errors import UserError

# Each special token, in the order in which missing ones get new ids, with the names that are looked for in the file.
_NAMES = {
    "bos_id": ("<|begin_of_text|>", "<s>", "<bos>"),
    "eos_id": ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>"),
    "pad_id": ("[PAD]", "<pad>", "<|pad|>"),
}
# Every byte that UTF-8 text can have: ASCII, each first byte of two, three and four, and each byte that follows one.
_CHARACTERS = [
    *range(0x100),
    *range(0x100, 0x800, 0x40),
    *range(0x800, 0x1000, 0x40),
    *range(0x1000, 0x10000, 0x1000),
    *range(0x10000, 0x110000, 0x30000),
]
# Texts that tokenizers change which are not byte-level or normalise text: one begins with a letter, as some put a space before it.
_PROBES = (
    "Two  spaces \t tab\n\n line\r\n caf\u00e9 cafe\u0301 \ufb01 日本語 한국어 😀👩‍🚀 \u2581 end ",
    "   three spaces first",
    "".join(map(chr, _CHARACTERS)),
)


class HuggingFaceTokenizer(BpeTokenizer):
    """A tokenizer.json that reproduces every text, and the special tokens that it lacks.

    bos, eos and pad are well-known tokens of the file; one that the file does not have gets a new id after the file's last.

    Two of the file's settings are left out. Unicode normalisation (NFC) would change text; without it, text that is in NFC
    has the same ids. Dropout of merges would give the same text other ids each time.
    """

    kind = "huggingface"
    _bpe: JsonBpe

    def __init__(self, model: bytes):
        super().__init__(model)
        self._bpe = JsonBpe(model)
        bpe = self._bpe.bpe
        if isinstance(bpe.normalizer, tokenizers.normalizers.NFC):
            bpe.normalizer = None
        if isinstance(bpe.model, tokenizers.models.BPE):
            bpe.model.dropout = None
        self._mark_special()
        self._check_lossless()
        self.vocab_size = self._bpe.num_ids
        for name, tokens in _NAMES.items():
            token_id = self._special_id(tokens)
            if token_id is None:
                token_id = self.vocab_size
                self.vocab_size += 1
            setattr(self, name, token_id)
        if len({self.bos_id, self.eos_id, self.pad_id}) < len(_NAMES):
            raise UserError(
                f"tokenizer: tokenizer.json has one id for two of bos, eos and pad ({self.bos_id}, {self.eos_id}, "
                f"{self.pad_id}): give each token an id of its own"
            )

    def _mark_special(self) -> None:
        """Makes bos, eos and pad special where the file has them as other added tokens, which text becomes."""
        names = {name for tokens in _NAMES.values() for name in tokens}
        added = self._bpe.bpe.get_added_tokens_decoder().values()
        plain = [token.content for token in added if not token.special and token.content in names]
        self._bpe.bpe.add_special_tokens(plain)

    def _check_lossless(self) -> None:
        """Raises `UserError` unless the probes, and each added token between spaces, are decoded as they were."""
        added = self._bpe.bpe.get_added_tokens_decoder().values()
        texts = [*_PROBES, *(f"a  {token.content}  b" for token in added)]
        try:
            decoded = [self._bpe.decode(ids) for ids in self._bpe.encode_batch(texts)]
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"tokenizer: tokenizer.json cannot encode text ({error})") from error
        for text, again in zip(texts, decoded, strict=True):
            if text != again:
                pairs = enumerate(zip(text, again, strict=False))
                start = next((place for place, (a, b) in pairs if a != b), len(again))
                raise UserError(
                    f"tokenizer: tokenizer.json does not reproduce text: {text[start : start + 10]!a} becomes "
                    f"{again[start : start + 10]!a}; give a byte-level tokenizer.json without normalisation; or "
                    "tokenizer.kind=sentencepiece, with the model's tokenizer.model or, to train one on your text, without a file"
                )

    def _special_id(self, tokens: Sequence[str]) -> int | None:
        """The id of the first of the tokens that the file has, without those that text can become."""
        for token in tokens:
            token_id = self._bpe.id_of(token)
            if token_id is not None and token_id not in self._bpe.encode_array(token):
                return token_id
        return None
