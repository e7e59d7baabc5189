"""WikiText, prepared with Llama 3's tokenizer, has the tokens of tiktoken itself."""

import json
import os
import pathlib

import numpy as np
import pytest
import tiktoken.load

from calm_jax.data.shards import prepared_blocks
from calm_jax.data.tokenizers import Tokenizer, TokenizerConfig, make_tokenizer
from tests.data.preparing import naive_documents, naive_published, options, prepared


@pytest.fixture(scope="module")
def wikitext() -> tuple[pathlib.Path, Tokenizer, list[list[int]]]:
    """The file, Llama 3's tokenizer, and the tokens that tiktoken itself gives for each piece of 10,000 words."""
    if "CALM_DATA" not in os.environ:
        pytest.skip("needs CALM_DATA, a folder with llama3_tokenizer.model and WikiText")
    folder = pathlib.Path(os.environ["CALM_DATA"])
    file, model = folder / "wikitext_document_level-test.json", folder / "llama3_tokenizer.model"
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = tiktoken.load.load_tiktoken_bpe(str(model))
    bpe = tiktoken.Encoding("llama3", pat_str=words, mergeable_ranks=ranks, special_tokens={})
    texts = [json.loads(line)["text"] for line in file.open(encoding="utf-8")]
    encoded = bpe.encode_ordinary_batch(naive_documents(texts, options(max_words=10_000)))
    assert len(encoded) > len(texts) == 62
    return file, make_tokenizer(TokenizerConfig("llama3", str(model), 0, True), ()), encoded


@pytest.mark.slow
@pytest.mark.parametrize(
    "eos, chunk, block, size, first, last",
    [
        (True, 4, 2048, 288768, [128000, 284, 8563, 426], [1202, 17444, 439, 264]),
        (False, 1, 8192, 286720, [128000, 284, 8563, 426], [54410, 389, 37102, 454]),
    ],
)
def test_prepared_wikitext_equals_tokens_of_tiktoken(
    tmp_path, wikitext, eos, chunk, block, size, first, last
):
    """With the options of the autoencoder's text and of the language model's."""
    file, tokenizer, encoded = wikitext
    bos_id, eos_id, pad_id = 128000, 128001, 128256
    framed = [[bos_id, *ids, *[eos_id] * eos] for ids in encoded]
    framed = [ids + [pad_id] * (-len(ids) % chunk) for ids in framed]
    text = prepared(
        tmp_path / "out",
        [file],
        tokenizer,
        packing="published",
        block_tokens=block,
        append_eos=eos,
        align_documents_to_chunks=chunk > 1,
        max_words=10_000,
    )
    expected = np.asarray(naive_published(framed, block))
    blocks = prepared_blocks(text, block, "published")
    assert text.num_tokens == expected.size == len(blocks) * block == size
    for tokens, item in zip(expected, blocks, strict=True):
        np.testing.assert_array_equal(item["tokens"], tokens)
    assert (text.tokens(0, 4).tolist(), text.tokens(size - 4, 4).tolist()) == (first, last)
