"""SentencePiece: reading a model, and training one on the corpus."""

import io
from collections.abc import Iterable, Sequence

import sentencepiece

from calm_jax.data.tokenizers.base import Tokenizer
from calm_jax.errors import UserError

# The pad id of the models trained here.
TRAINED_PAD = 3


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that has bos, eos and pad.

    SentencePiece encodes a space as U+2581; therefore a U+2581 in the text is decoded as a space.
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


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> bytes:
    """Trains a lossless BPE model with byte fallback. Raises `UserError` if the texts are too few for `vocab_size`."""
    # SentencePiece drops sentences longer than its limit, so long documents are passed in pieces.
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
            pad_id=TRAINED_PAD,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"tokenizer.vocab_size={vocab_size}: SentencePiece cannot train on this corpus ({str(error).splitlines()[-1]})"
        ) from error
    return model.getvalue()
