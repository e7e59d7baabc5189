"""Tokenizers behind one small interface: SentencePiece, Llama 3, tokenizer.json, plain bytes.

Text never becomes a special token: a document that contains `<|end_of_text|>` is encoded as the characters of that string.
"""

from calm_jax.data.tokenizers.base import ByteTokenizer, Tokenizer
from calm_jax.data.tokenizers.config import (
    KINDS,
    TokenizerConfig,
    Vocabulary,
    check_path,
    load_tokenizer,
    make_tokenizer,
    open_tokenizer,
    vocabulary,
)
from calm_jax.data.tokenizers.huggingface import HuggingFaceTokenizer
from calm_jax.data.tokenizers.llama3 import Llama3Tokenizer
from calm_jax.data.tokenizers.sentencepiece import SentencePieceTokenizer

__all__ = [
    "KINDS",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Llama3Tokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "TokenizerConfig",
    "Vocabulary",
    "check_path",
    "load_tokenizer",
    "make_tokenizer",
    "open_tokenizer",
    "vocabulary",
]
