"""The suites `growth` and `costs` of `python -m benchmarks`: exponents, and the parts of a compiled step."""

import pytest

from benchmarks.suites import costs, growth
from benchmarks.suites.train import fresh
from calm_jax.config import resolve
from calm_jax.data.tokenizers import Vocabulary
from tests import tiny_recipe


def test_an_exponent_is_the_slope_of_the_logarithms():
    assert growth.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)
    assert growth.exponent([1, 10], [7.0, 7.0]) == pytest.approx(0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [axis for axis in growth.AXES if axis.case == "ae"])
def test_a_step_has_the_given_size(axis, monkeypatch):
    monkeypatch.setattr(growth, "_median", lambda options, run: 1.0)
    tree = tiny_recipe.get_config("nothing")
    tree.tokenizer.kind = "sentencepiece"
    first, last = (
        growth.step(None, "ae", tree, axis.key, value)[1]
        for value in (axis.values[0], axis.values[-1])
    )
    assert last > 2 * first


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
        ("jit(step)/jvp(Autoencoder.loss)/Autoencoder.encode/encode/norm/mul", "encoder"),
        ("jit(step)/jvp(Autoencoder.loss)/decode/Autoencoder._refine/mlp/mul", "decoder"),
        ("jit(step)/jvp(Autoencoder.loss)/reduce_sum", "vocabulary and cross-entropy"),
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
