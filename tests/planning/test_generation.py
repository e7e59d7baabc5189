"""Plans of generation: bytes of one pass on paper are those of the arrays; the command prints bounds for real hardware."""

import contextlib
import json

import jax
import pytest

from calm_jax.config import resolve
from calm_jax.cost import sizes
from calm_jax.planning import fitting, generation, topology
from calm_jax.planning.generation import plan_decode, planned_batches
from calm_jax.planning.topology import Topology
from configs import calm_m, quickstart
from tests.planning.test_planner import need_cuda, need_tpu, plan


class Here(Topology):
    """This machine's CPU with the rates of a v5e."""

    platform = "cpu"

    def devices(self) -> list[jax.Device]:
        return jax.devices()[:1]

    def answering(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def quickstart_in_float32(head: str):
    """Four bytes for each number, on every CPU."""
    recipe = quickstart.get_config(f"head={head}")
    recipe.compute_dtype = "float32"
    return recipe


@pytest.mark.slow
def test_a_chunk_takes_one_pass_over_the_weights_and_the_cache():
    recipe = quickstart_in_float32("energy")
    recipe.sample.sampler = "pooled"
    config = resolve(recipe)
    one, four = (plan_decode(config, Here("v5e", "1x1"), batch, 1) for batch in (1, 4))
    body = config.lm.model
    # Keys and values of the context in float32.
    positions = config.lm.data.block_tokens // config.chunk_size
    cache = 2 * body.num_layers * positions * body.num_kv_heads * body.head_size * 4
    assert four.one_pass - one.one_pass == 3 * cache
    assert (one.tokens, four.tokens) == (config.chunk_size, 4 * config.chunk_size)
    # The program has to read all of it; what it needs in memory holds it.
    assert four.moved > four.one_pass and four.needed > four.one_pass
    assert four.fits and four.limit == "memory bandwidth"
    assert four.tokens_per_second == pytest.approx(four.tokens * 819e9 / four.one_pass)
    # Below T = 1 more draws are decoded, and nothing else changes.
    half = plan_decode(config, Here("v5e", "1x1"), 4, 0.5)
    assert (one.draws, half.draws) == (1, 16) and half.one_pass == four.one_pass
    assert half.limits["compute"] > 4 * four.limits["compute"]


@pytest.mark.slow
def test_the_token_predictors_weights_are_read_with_a_token_prior_alone():
    recipe = quickstart_in_float32("energy")
    with_prior, predictor = resolve(recipe), sizes.language_model(resolve(recipe), 4096)
    recipe.lm.token_prior_weight = 0.0
    more = generation._weight_bytes(with_prior, 4096) - generation._weight_bytes(
        resolve(recipe), 4096
    )
    assert more == 4 * predictor["token predictor"] > 4 * 4096 * 256


@pytest.mark.slow
def test_decoding_that_the_compiler_refuses_does_not_fit(monkeypatch):
    """Of the hardware's 16 GiB the compiler has only 15.75 left for programs."""
    recipe = quickstart_in_float32("energy")
    recipe.sample.sampler = "pooled"
    hardware, compile_program, compiled = Here("v5e", "1x1"), fitting.compile_program, []

    def refuse_the_last(lowered, arguments, options):
        compiled.append(lowered)
        if len(compiled) < 3:
            return compile_program(lowered, arguments, options)
        return fitting.Compiled(None, {"temporaries": 15.8 * 2**30 - arguments}, 15.75 * 2**30)

    generation._prefilled.cache_clear()
    monkeypatch.setattr(fitting, "compile_program", refuse_the_last)
    refused = plan_decode(resolve(recipe), hardware, 2, 1)
    assert len(compiled) == 3 and refused.needed < hardware.memory
    assert not refused.fits and refused.available == 15.75 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("head", "evaluations"), [("diffusion", 7), ("flow", 14)])
def test_the_weights_of_a_head_are_read_in_each_evaluation_of_its_network(head, evaluations):
    recipe = quickstart_in_float32(head)
    recipe.lm.head.num_steps, recipe.sample.sampler = 7, "pooled"
    many = resolve(recipe)
    with recipe.unlocked():
        recipe.lm.head.num_steps = 14
    more = resolve(recipe)
    few, twice = (plan_decode(config, Here("v5e", "1x1"), 1, 1) for config in (many, more))
    width = many.lm.model.hidden_size
    size = sizes.language_model(many, 512)["head"] - width * (width + 1)
    assert twice.one_pass - few.one_pass == evaluations * 4 * size
    # It is still a bound for the compiled program.
    assert few.moved > few.one_pass and twice.moved > twice.one_pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "hardware",
    [pytest.param("h100:1", marks=need_cuda), pytest.param("v5e:1x1", marks=need_tpu)],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_decoding_moves_little_more_than_one_pass(hardware, batch):
    """CALM-M in bfloat16: the cache is updated in place, and no kernel is copied. The padding of a TPU's layouts does not count."""
    one = plan_decode(resolve(calm_m.get_config()), topology.parse(hardware), batch, 1)
    assert one.moved <= 1.3 * one.one_pass


@pytest.mark.parametrize(
    ("devices", "batches"),
    [(1, [1, 8, 64]), (4, [4, 8, 64]), (16, [16, 64]), (32, [32, 64]), (256, [256])],
)
def test_a_batch_that_rounds_up_to_another_is_not_planned_again(devices, batches):
    axes = ("data", "fsdp", "tensor")
    mesh = jax.sharding.AbstractMesh((devices, 1, 1), axes)
    assert planned_batches(mesh) == batches


@pytest.mark.slow
@need_cuda
def test_generation_is_planned_for_a_gpu(tmp_path):
    output = f"--output={tmp_path / 'plan.json'}"
    recipe = "--config=configs/quickstart.py"
    done = plan(recipe, "--topology=h100:1", "--stage=generate", output)
    assert done.returncode == 0, done.stderr
    plans = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert [(one["batch"], one["temperature"]) for one in plans] == [
        (batch, temperature) for batch in (1, 8, 64) for temperature in (1, 0.5)
    ]
    assert all(one["fits"] and one["moved"] != 0 for one in plans)
    assert "tokens/s" in done.stdout
