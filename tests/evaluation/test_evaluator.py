"""The evaluation of a split: its sums, and the order in which batches are started and fetched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.data.loader import evaluation_batches
from calm_jax.data.packing import MASKED, Blocks
from calm_jax.evaluation import evaluator as evaluator_lib
from calm_jax.evaluation.evaluator import Evaluator
from calm_jax.parallel.mesh import make_mesh
from tests.tiny_recipe import get_config


class Counting:
    """A task whose sums are the targets that count, and a random number for each block."""

    def evaluate(self, params, frozen, batch, key_B):
        is_whole_B = (batch["targets"] != MASKED).all(-1)
        drawn_B = jax.vmap(jax.random.uniform)(key_B)
        return {
            "tokens": jnp.where(is_whole_B[:, None], batch["targets"], 0).sum(),
            "drawn": jnp.where(is_whole_B, drawn_B, 0).sum(),
        }

    def report(self, total):
        return {name: float(value) for name, value in total.items()}


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_batch_is_started_before_the_one_before_it_is_fetched(num_batches, monkeypatch):
    """So that the devices do not wait for the host; no more than two are under way at once."""
    config = resolve(get_config("*.txt"))
    eval_config, mesh = dataclasses.replace(config.eval, batch_size=4), make_mesh(config.mesh)
    tokens = np.arange(4 * num_batches * 8, dtype=np.int32).reshape(-1, 8)[:-1]
    blocks, order = Blocks(tokens, np.full(len(tokens), 8)), []
    add_sums = evaluator_lib.add_sums
    with jax.set_mesh(mesh):
        evaluator = Evaluator("test", Counting(), blocks, eval_config, mesh)
        sums = evaluator._sums

        def started(*given):
            order.append("start")
            return sums(*given)

        def fetched(total, new):
            order.append("fetch")
            return add_sums(total, new)

        evaluator._sums = started
        monkeypatch.setattr(evaluator_lib, "add_sums", fetched)
        report = evaluator({}, {}, between=lambda: order.append("between"))
        batches = evaluation_batches(blocks, range(len(blocks)), 4, range(4))
        one_by_one = [sums({}, {}, batch | {"index": index_B}) for batch, index_B in batches]
    later = ["start", "fetch", "between"] * (num_batches - 1)
    assert order == ["start", "between", *later, "fetch"]
    drawn = [np.float64(one["drawn"]) for one in one_by_one]
    assert report == {"tokens": tokens.sum(), "drawn": sum(drawn)}
