"""The suites `growth` and `costs` of `python -m benchmarks`: exponents, and the parts of a compiled step."""

import dataclasses
import types

import numpy as np
import pytest

from benchmarks.measure import Options
from benchmarks.suites import costs, growth
from benchmarks.suites.generate import generator_of
from benchmarks.suites.train import fresh
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from configs import ar_s, bench_small
from tests import tiny_recipe

BENCH_OPTIONS = Options(
    tree=None,
    stage="",
    repeats=2,
    seconds=60.0,
    rounds=1,
    samplers=(),
    batches=(),
    new_tokens=8,
    workdir="",
)


def test_an_exponent_is_the_slope_of_the_logarithms():
    assert growth.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert growth.exponent([1, 10], [7.0, 7.0]) == pytest.approx(0)


@pytest.mark.parametrize("axis", [axis for axis in growth.AXES if axis.case != "decode"])
def test_a_step_has_the_given_size(axis, monkeypatch):
    """Its FLOPs change with the size; but for the vocabulary of CALM, whose step has no product with it."""
    monkeypatch.setattr(growth, "_times", lambda options, run: [1.0])
    monkeypatch.setattr(
        growth,
        "fresh",
        lambda config, *_: types.SimpleNamespace(
            batch={"tokens": np.zeros(tokens_of(config, axis.case))}, advance=None
        ),
    )
    first, last = (
        growth.step(None, axis.case, bench_small.get_config(), axis.key, value)[1]
        for value in (axis.values[0], axis.values[-1])
    )
    assert (last == first) == ((axis.case, axis.name) == ("calm", "vocabulary"))


def tokens_of(config, case):
    section = config.autoencoder if case == "ae" else config.lm
    return section.training.batch_size, section.data.block_tokens


def test_a_recipe_of_the_baseline_has_its_own_sizes_alone():
    options = types.SimpleNamespace(tree=ar_s.get_config())
    options.tree.tokenizer.path = "tokenizer.model"
    assert list(growth.cases(options)) == ["grow:ar:batch", "grow:ar:block"]


@pytest.mark.slow
def test_a_decoded_chunk_is_timed():
    options = dataclasses.replace(BENCH_OPTIONS, tree=tiny_recipe.get_config("nothing"))
    options.tree.lm.data.block_tokens = 256
    config = resolve(options.tree)
    model = generator_of(config, "")
    times, computed = growth.decoded_chunk(options, model, config, "draws", 4)
    assert len(times) == 2 and computed > 0


@pytest.mark.slow
def test_a_step_has_records_of_all_its_parts():
    tree = tiny_recipe.get_config("nothing,token_predictor")
    records = costs.cases(dataclasses.replace(BENCH_OPTIONS, tree=tree))["costs:calm"]()
    assert records[0]["case"] == "costs:calm" and records[0]["flops"] > 0
    parts = {one["case"]: one for one in records[1:]}
    assert sum(one["of_step"] for one in parts.values()) == pytest.approx(1)
    assert parts["costs:calm: token predictor"]["share"] > 0


HLO = """
%fused (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0)
  ROOT %m = f32[2]{0} multiply(%p, %p), metadata={op_name="jit(step)/jvp(CALM.hidden)/layers/mlp/mul"}
}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  %inside = f32[2]{0} fusion(%x), kind=kLoop, calls=%fused
  ROOT %own = f32[2]{0} add(%inside, %x), metadata={op_name="jit(step)/add"}
}
"""


def test_a_fusion_without_a_name_has_that_of_its_operations():
    names = costs.op_names(HLO)
    assert names["inside"] == names["m"] == "jit(step)/jvp(CALM.hidden)/layers/mlp/mul"
    assert costs.part_of(names["inside"]) == "MLP"
    assert costs.part_of(names["own"]) == "optimizer, checks, and what has no name"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(step)/transpose(jvp(CALM.loss))/head.loss/head/head/blocks/hidden/dot", "head"),
        ("jit(step)/jvp(CALM.loss)/head.loss/vmap(jit(_normal))/erf_inv", "random numbers"),
        ("jit(step)/jvp(CALM.loss)/head.loss/sub", "energy score"),
        ("jit(step)/jvp(CALM.token_loss)/token_predictor.loss/dot", "token predictor"),
        ("jit(step)/jvp(Autoencoder.draw_noise)/vmap(jit(_randint))/mul", "random numbers"),
        ("jit(step)/jvp(Autoencoder.loss)/Autoencoder.encode/encode/norm/mul", "encoder"),
        ("jit(step)/jvp(Autoencoder.loss)/decode/Autoencoder._refine/mlp/mul", "decoder"),
        ("jit(step)/jvp(Autoencoder.loss)/reduce_sum", "vocabulary"),
        ("jit(step)/jvp(AutoregressiveLM.hidden)/backbone/layers/attention/dot", "attention"),
    ],
)
def test_an_operation_belongs_to_the_part_of_its_module(name, part):
    assert costs.part_of(name) == part


@pytest.mark.slow
def test_the_parts_of_a_step_are_found_in_a_trace():
    tree = tiny_recipe.get_config("nothing")
    parts = costs.parts_of(fresh(resolve(tree), "lm", Vocabulary(259, 256)), 2)
    assert {"head", "MLP", "attention", "energy score", "embedding"} <= set(parts)
    assert all(seconds > 0 for seconds in parts.values())
