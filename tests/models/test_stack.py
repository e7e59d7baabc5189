"""The layout for generation: the same model, with the layers apart and fewer products."""

import jax
import numpy as np
import pytest

from calm_jax.models import stack
from tests.tiny_model import tiny


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "k=4",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("k=1", "head=diffusion", "head=flow", "head=softmax")
        ),
    ],
)
def test_stacked_layers_and_layers_apart_give_the_same_text(arguments, monkeypatch):
    """One prompt and several. Hidden states differ by rounding, so that a draw differs for one chunk in thousands."""
    made = tiny(arguments)
    apart = made.generator()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(apart.params)]
    assert any("layers_1" in path and "query_key_value" in path for path in paths)
    frozen = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(apart.frozen)]
    assert any("gate_up" in path for path in frozen) == made.config.has_autoencoder
    assert not any("'layers'" in path or "'query'" in path for path in paths)
    prompts = [list(b"def f(x):"), list(b"import os"), list(b"x")]
    texts = [apart.generate(some, made.config.sample) for some in (prompts[:1], prompts)]
    monkeypatch.setattr(stack, "_PLATFORMS", ())
    stacked = made.generator()
    for some, text in zip((prompts[:1], prompts), texts, strict=True):
        expected = stacked.generate(some, made.config.sample)
        assert [one.tokens for one in text] == [one.tokens for one in expected]


def test_grouped_heads_are_merged_in_their_order():
    """Queries first, then keys, then values."""
    rng = np.random.default_rng(0)
    parts = {
        name: {"kernel": rng.normal(size=(3, 8, heads, 2)).astype(np.float32)}
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    }
    apart = stack._apart({"layers": {"attention": parts}}, (("layers",),))
    assert sorted(apart) == ["layers_0", "layers_1", "layers_2"]
    merged = apart["layers_1"]["attention"]["query_key_value"]["kernel"]
    expected = np.concatenate([parts[name]["kernel"][1] for name in parts], axis=1)
    np.testing.assert_array_equal(merged, expected)
