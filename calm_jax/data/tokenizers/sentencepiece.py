"""SentencePiece: reading a model, and training one on the corpus."""

import collections
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sentencepiece
from absl import logging

from calm_jax.data.tokenizers.base import Tokenizer
from calm_jax.errors import UserError

# The pad id of the models trained here.
TRAINED_PAD = 3


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that has bos and eos. Without pad, it gets a pad id after its last piece.

    SentencePiece encodes a space as U+2581; therefore a U+2581 in the text is decoded as a space.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        super().__init__(model)
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        # SentencePiece raises ValueError for a piece that is not valid UTF-8.
        except (RuntimeError, ValueError) as error:
            raise UserError("tokenizer: the file is no SentencePiece model") from error
        num_pieces = self._processor.get_piece_size()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        pad_id = self._processor.pad_id()
        self.pad_id = num_pieces if pad_id < 0 else pad_id
        self.vocab_size = max(self.pad_id + 1, num_pieces)
        for name in ("bos_id", "eos_id"):
            if getattr(self, name) < 0:
                raise UserError(
                    f"tokenizer: the SentencePiece model has no {name}, which CALM needs: train it with one (spm_train --{name}=N), "
                    "or give no file, to train a model on your text"
                )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts))

    def _decode_text(self, ids: list[int]) -> str:
        # A model trained on text without spaces has no piece for U+2581. It encodes a space as the bytes of U+2581, which
        # the library decodes as they are.
        return self._processor.decode(ids).replace("\u2581", " ")


# The least `tokenizer.vocab_size` of a model that is trained here: 256 bytes, 4 special tokens and some text.
LEAST_PIECES = 300
_FIXED_PIECES = 260
# SentencePiece marks rare characters with this one, and leaves out sentences that contain it.
_RESERVED = "\u2585"


def train_sentencepiece(texts: Iterable[str], vocab_size: int, whitespace_pieces: bool) -> bytes:
    """Trains a lossless BPE model with byte fallback.

    The characters that make up 99.9 % of the texts have pieces of their own. If `vocab_size` has no room for all of them,
    as for Chinese with a small vocabulary, only the most frequent have. All other characters are encoded as bytes.
    With `whitespace_pieces` a run of spaces can be one piece. Without, each space of it is a piece, or the beginning of a word.

    Raises:
        UserError: the texts are too short for `vocab_size`. The message proposes a size for which they are long enough.
    """
    texts = list(texts)
    try:
        return _train(texts, vocab_size, 0.999, whitespace_pieces)
    except RuntimeError:
        pass  # too many characters, or too little text
    try:
        frequent, number = _frequent_characters(texts, vocab_size)
        model = _train(_parts(texts, frequent), vocab_size, 1.0, whitespace_pieces)
    except RuntimeError as error:
        size = _trainable_size(texts, vocab_size, whitespace_pieces)
        way_out = f"vocab_size={size}" if size else "kind=bytes"
        raise UserError(
            f"tokenizer.vocab_size={vocab_size}: SentencePiece finds too few pieces in the training text: give more text, or "
            f"--config.tokenizer.{way_out}"
        ) from error
    if len(frequent) < number:
        logging.warning(
            "tokenizer.vocab_size=%d has room for %d of the %d characters of the training text; the others are encoded as "
            "bytes, and a larger vocabulary would make fewer tokens",
            vocab_size,
            len(frequent),
            number,
        )
    return model


def _train(
    texts: Iterable[str],
    vocab_size: int,
    character_coverage: float,
    whitespace_pieces: bool,
    must_fill: bool = True,
) -> bytes:
    """A model of `vocab_size` pieces, or of fewer without `must_fill`. Raises `RuntimeError` if it cannot be trained."""
    # SentencePiece drops sentences longer than its limit, so long documents are passed in pieces.
    piece = 4000
    pieces = (text[i : i + piece] for text in texts for i in range(0, len(text), piece))
    # A model contains the options that were given, and its hash is compared: giving the default explicitly would change the hash.
    options: dict[str, Any] = {} if must_fill else {"hard_vocab_limit": False}
    if whitespace_pieces:
        options["allow_whitespace_only_pieces"] = True
    model = io.BytesIO()
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
        character_coverage=character_coverage,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=TRAINED_PAD,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def _frequent_characters(texts: Sequence[str], vocab_size: int) -> tuple[str, int]:
    """For a vocabulary too small for all characters: those that get pieces of their own, and the number of all."""
    counts: collections.Counter[str] = collections.Counter()
    for text in texts:
        counts.update(text)
    # Two thirds of the free pieces are for single characters. Of the shares from 1/4 to 9/10 that were tried on Chinese,
    # Japanese, Russian and mixed text with 300 to 2048 pieces, this gives the fewest tokens, or at most 9 % more.
    room = (vocab_size - _FIXED_PIECES) * 2 // 3
    number = len(counts)
    del counts[_RESERVED]
    return "".join(letter for letter, _ in counts.most_common(room)), number


def _parts(texts: Sequence[str], characters: str) -> Iterator[str]:
    """The parts of the texts that consist of some characters and spaces.

    Trained on these, SentencePiece gives no other character a piece. Its own option, `character_coverage`, can leave out
    only characters that make up at most 2 % of the text.
    """
    others = re.compile(f"[^{re.escape(characters)} ]+")
    for text in texts:
        yield from filter(None, others.split(text))


def _trainable_size(texts: Sequence[str], vocab_size: int, whitespace_pieces: bool) -> int:
    """A vocabulary size that can be trained on texts that are too short for `vocab_size`; 0 if there is none."""
    while vocab_size >= LEAST_PIECES:
        frequent, _ = _frequent_characters(texts, vocab_size)
        try:
            model = _train(
                _parts(texts, frequent), vocab_size, 1.0, whitespace_pieces, must_fill=False
            )
        except RuntimeError:
            break
        size = SentencePieceTokenizer(model).vocab_size
        if size == vocab_size:
            return size
        # A smaller vocabulary has pieces for fewer characters, and perhaps cannot be filled either.
        vocab_size = size
    return 0
