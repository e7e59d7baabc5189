"""Parameter counts against the paper, and bytes on paper against the arrays themselves."""

import jax
import pytest

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import resolve
from calm_jax.cost import sizes
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.models.heads import HEADS
from calm_jax.training.optimizer import make_optimizer
from configs import calm_m, calm_xl, quickstart

# Llama 3's vocabulary with the pad token.
VOCABULARY = 128257


def test_language_models_have_the_papers_number_of_parameters():
    """Paper, table 1."""
    for recipe, millions in ((calm_m, 371.7), (calm_xl, 1830.4)):
        parts = sizes.language_model(resolve(recipe.get_config()), VOCABULARY)
        assert round(sum(parts.values()) / 1e6, 1) == pytest.approx(millions, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_belongs_to_one_part(head):
    config, words = resolve(quickstart.get_config(f"head={head}")), Vocabulary(500, 499)
    tasks = {"lm": make_lm_task(config, words)}
    if config.has_autoencoder:
        tasks["autoencoder"] = make_autoencoder_task(config, words)
    for stage, task in tasks.items():
        params = jax.eval_shape(task.init, jax.random.key(0))
        parts = sizes.trained(config, stage, words.vocab_size)
        assert sum(parts.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))
        assert all(parts.values())
        assert parts["token embeddings"] == 500 * getattr(config, stage).model.hidden_size


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_state_bytes_equal_the_sizes_of_the_arrays():
    config, words = resolve(calm_m.get_config()), Vocabulary(500, 499)
    task = make_lm_task(config, words)
    params = jax.eval_shape(task.init, jax.random.key(0))
    optimizer = jax.eval_shape(make_optimizer(config.lm.optimizer, 10).init, params)
    other = jax.eval_shape(make_autoencoder_task(config, words).init, jax.random.key(0))
    on_paper = sizes.state_bytes(config, "lm", words.vocab_size)
    assert on_paper["parameters"] == on_paper["gradients"] == bytes_of(params)
    assert on_paper["frozen"] == bytes_of(other)
    # The arrays hold the optimizer's step counters besides.
    assert 0 <= bytes_of(optimizer) - on_paper["optimizer"] < 100


def test_ideal_traffic_gathers_parameters_twice_and_scatters_gradients_once():
    config = resolve(calm_m.get_config())
    trained = sum(sizes.trained(config, "autoencoder", 1000).values())
    four = sizes.fsdp_traffic(config, "autoencoder", 1000, 2, 1, 4)
    assert four == 2 * 3 * 2 * trained * 3 / 4
    # Over the data axis, an all-reduce of each device's quarter of the gradients, once for both microbatches.
    both = sizes.fsdp_traffic(config, "autoencoder", 1000, 2, 2, 4)
    assert both - four == 2 * 2 * trained / 4 / 2
    # The frozen decoder is never read in training.
    frozen = sizes.frozen(config, "lm", 1000)
    read = sum(frozen.values()) - frozen["decoder"]
    trained = sum(sizes.trained(config, "lm", 1000).values())
    # The gradient of the token embeddings does not need their values, so that they are gathered once.
    table = sizes.trained(config, "lm", 1000)["token embeddings"]
    ideal = (6 * trained - 2 * table + 4 * read) / 2
    assert sizes.fsdp_traffic(config, "lm", 1000, 1, 1, 2) == ideal
