"""Bytes on paper are those of the arrays; parameters are held against every recipe's shapes in test_mesh.py."""

import jax
import pytest

from calm_jax import sizes
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.models.transformer import KVCache
from calm_jax.optim import make_optimizer
from calm_jax.workdir import make_autoencoder_task, make_lm_task
from configs import calm_m, calm_xl
from tests.test_mesh import LLAMA


def test_the_published_counts():
    """Paper, table 1."""
    for recipe, millions in ((calm_m, 371.7), (calm_xl, 1830.4)):
        parts = sizes.language_model(resolve(recipe.get_config()), LLAMA.vocab_size)
        assert round(sum(parts.values()) / 1e6, 1) == pytest.approx(millions, abs=1)


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_bytes_of_the_state_are_those_of_the_arrays():
    config, words = resolve(calm_m.get_config()), Vocabulary(500, 499)
    task = make_lm_task(config, words, config.eval.published)
    params = jax.eval_shape(task.init, jax.random.key(0))
    optimizer = jax.eval_shape(make_optimizer(config.lm.optimizer, 10).init, params)
    other = jax.eval_shape(make_autoencoder_task(config, words).init, jax.random.key(0))
    on_paper = sizes.state_bytes(config, "lm", words.vocab_size)
    assert on_paper["parameters"] == on_paper["gradients"] == bytes_of(params)
    assert on_paper["frozen"] == bytes_of(other)
    # And some counters of the schedule.
    assert 0 <= bytes_of(optimizer) - on_paper["optimizer"] < 100


def test_bytes_of_the_cache_are_those_of_the_arrays():
    config = resolve(calm_m.get_config())
    cache = jax.eval_shape(lambda: KVCache.empty(config.lm.model, 3, 512, 512, "bfloat16"))
    assert sizes.cache_bytes(config, 3, 2048) == bytes_of((cache.key, cache.value))


def test_ideal_traffic_is_three_passes_over_what_is_trained():
    config = resolve(calm_m.get_config())
    trained = sum(sizes.trained(config, "autoencoder", 1000).values())
    four = sizes.fsdp_traffic(config, "autoencoder", 1000, 2, 1, 4)
    assert four == 2 * 3 * 2 * trained * 3 / 4
    # Over data, each device's quarter there and back, once for both microbatches.
    both = sizes.fsdp_traffic(config, "autoencoder", 1000, 2, 2, 4)
    assert both - four == 2 * 2 * trained / 4 / 2
    # The frozen decoder is never read in training.
    frozen = sizes.frozen(config, "lm", 1000)
    read = sum(frozen.values()) - frozen["decoder"]
    trained = sum(sizes.trained(config, "lm", 1000).values())
    # The table's gradient does not need the table.
    table = sizes.trained(config, "lm", 1000)["token embeddings"]
    ideal = (6 * trained - 2 * table + 4 * read) / 2
    assert sizes.fsdp_traffic(config, "lm", 1000, 1, 1, 2) == ideal
