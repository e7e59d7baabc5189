"""The equal-context protocol scores the same n-grams for every model of a recipe."""

import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.run.dataset import Dataset, read_corpus
from tests import tiny_recipe

BYTES = ByteTokenizer(b"")
BOS, EOS = BYTES.bos_id, BYTES.eos_id


@pytest.fixture(scope="module")
def text_files(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("windows")
    rng = np.random.default_rng(0)
    for number in range(9):
        words = rng.choice(["def", "self", "return", "(", ")", "x"], size=60 + 37 * number)
        (folder / f"{number}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


def recipe_text(files, arguments, **changes) -> Dataset:
    """The tiny recipe's text, with documents neither aligned to chunks nor preceded by pads, as in the published code."""
    tree = tiny_recipe.get_config(f"{files},{arguments}")
    tree.lm.data.align_documents_to_chunks = False
    tree.lm.data.front_fill = "none"
    tree.update_from_flattened_dict(changes)
    config = resolve(tree)
    return Dataset(config, read_corpus(config, ("lm",)), BYTES)


def scored_ngrams(text: Dataset) -> tuple[list, list]:
    """The n-grams that the equal-context protocol scores, sorted, and their number for each n."""
    ngrams_BP4, counted_BP4 = text._scored(text.windows(), text._config.eval.equal_context)
    return sorted(ngrams_BP4[counted_BP4[..., -1]].tolist()), counted_BP4.sum((0, 1)).tolist()


def ngrams_by_hand(text: Dataset, context: int, every: int) -> tuple[list, list]:
    """The same from the documents: n-grams at every multiple of `every` tokens from `context` on."""
    ngrams, counts = [], [0] * 4
    for ids in text._validation.encoded:
        document = [BOS, *ids.tolist(), EOS]
        for place in range(context, len(document), every):
            ngram = document[place : place + 4]
            ngrams += [ngram] if len(ngram) == 4 else []
            counts = [count + (len(ngram) >= n) for n, count in enumerate(counts, 1)]
    return sorted(ngrams), counts


@pytest.mark.parametrize(
    "variant", ["k=1", "k=2", "k=4", "k=8", "k=16", "head=softmax", "head=flow,k=8"]
)
def test_equal_context_scores_the_same_ngrams_for_every_model(text_files, variant):
    text = recipe_text(text_files, variant)
    expected = ngrams_by_hand(text, 16, 4)
    assert expected[0] and scored_ngrams(text) == expected


@pytest.mark.parametrize("variant", ["k=1", "k=2", "k=3", "k=4", "k=6", "head=softmax"])
def test_starts_every_12_tokens_serve_chunk_sizes_that_divide_12(text_files, variant):
    changes = {"eval.start_every": 12, "eval.context_tokens": 12, "eval.block_tokens": 48}
    text = recipe_text(text_files, variant, **changes)
    expected = ngrams_by_hand(text, 12, 12)
    assert expected[0] and scored_ngrams(text) == expected


@pytest.mark.parametrize("variant", ["k=1", "k=2", "k=8", "k=16", "head=softmax"])
def test_equal_context_floor_is_the_same_for_every_model(text_files, variant):
    ours, expected = (recipe_text(text_files, v).equal_context_floor() for v in (variant, "k=4"))
    assert 0 < expected.brierlm < 100 and ours == expected


def test_equal_context_floor_is_the_same_for_every_chunk_size_with_aligned_chunks(text_files):
    changes = {"lm.data.align_documents_to_chunks": True, "lm.data.front_fill": "random"}
    floors = [
        recipe_text(text_files, variant, **changes).equal_context_floor().brierlm
        for variant in ("k=1", "k=2", "k=4", "k=8", "head=softmax")
    ]
    assert len(set(floors)) == 1


@pytest.mark.parametrize("variant", ["k=4", "k=16", "head=softmax"])
def test_context_longer_than_every_document_is_refused(text_files, variant):
    changes = {"eval.context_tokens": 5000, "eval.block_tokens": 6000}
    text = recipe_text(text_files, variant, **changes)
    longest = max(len(ids) for ids in text._validation.encoded) + 2
    with pytest.raises(
        UserError, match=rf"eval\.context_tokens=5000: .* {longest} tokens"
    ) as caught:
        text.windows()
    assert "\n" not in str(caught.value)


def test_start_every_larger_than_all_windows_is_refused(text_files):
    with pytest.raises(UserError, match=r"no n-gram to score starts .* eval\.start_every=1000"):
        recipe_text(text_files, "k=4", **{"eval.start_every": 1000}).windows()
