"""FLOPs on paper against the published table, and against XLA's count of a small step."""

import importlib

import jax
import jax.numpy as jnp
import pytest

from calm_jax.build import make_autoencoder_task, make_lm_task
from calm_jax.config import Config, resolve
from calm_jax.cost import flops
from calm_jax.cost.flops import Count
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.parallel.devices import accelerator
from configs import calm_m, quickstart

# Llama 3's vocabulary with the pad token.
VOCABULARY = 128257
# Tokens that the published models were trained on.
TOKENS = 500e9

# Published training FLOPs in 1e20 and inference FLOPs per token in 1e8, and the relative error allowed for each.
TABLE = {
    "ar_s": (6.6, 4.4, 0.006, 0.006),
    "ar_m": (11.9, 7.9, 0.02, 0.02),
    "ar_l": (22.5, 15.0, 0.002, 0.002),
    "calm_m": (3.7, 2.9, 0.11, 0.01),
    "calm_l": (7.7, 4.6, 0.11, 0.01),
    "calm_xl": (19.5, 9.4, 0.11, 0.04),
}


def recipe(name: str) -> Config:
    return resolve(importlib.import_module(f"configs.{name}").get_config())


@pytest.mark.parametrize("name", TABLE)
def test_flops_match_the_published_table(name):
    training, inference, training_margin, inference_margin = TABLE[name]
    config = recipe(name)
    ours = sum(flops.lm_training(config, VOCABULARY, Count.PAPER).values()) * TOKENS / 1e20
    assert abs(ours / training - 1) <= training_margin
    ours = sum(flops.inference(config, VOCABULARY, Count.PAPER, 0, 1, 1).values()) / 1e8
    assert abs(ours / inference - 1) <= inference_margin


@pytest.mark.parametrize(
    "name, training, inference",
    [("ar_s", "6.6", "4.42"), ("ar_l", "22.5", "15.01")],
)
def test_two_baselines_match_the_published_table_to_the_last_digit(name, training, inference):
    config = recipe(name)
    ours = sum(flops.lm_training(config, VOCABULARY, Count.PAPER).values()) * TOKENS / 1e20
    assert f"{ours:.1f}" == training
    ours = sum(flops.inference(config, VOCABULARY, Count.PAPER, 0, 1, 1).values()) / 1e8
    assert f"{ours:.2f}" == inference


def test_generation_of_calm_m_is_half_backbone_and_half_decoder():
    parts = flops.inference(recipe("calm_m"), VOCABULARY, Count.PAPER, 0, 1, 1)
    shares = {name: round(100 * part / sum(parts.values())) for name, part in parts.items()}
    assert shares == {"backbone": 48, "head": 5, "decoder": 47}
    # With the batch algorithm's 200 candidates, all of them decoded.
    many = flops.inference(recipe("calm_m"), VOCABULARY, Count.PAPER, 0, 200, 200)
    assert 103 < sum(many.values()) / sum(parts.values()) < 105


def test_our_count_is_below_the_papers():
    """Because attention is causal and draws share work."""
    for name in TABLE:
        config = recipe(name)
        ours, paper = (
            flops.lm_training(config, VOCABULARY, count) for count in (Count.OURS, Count.PAPER)
        )
        # At most the paper's 2048 positions are attended to in a block.
        assert 0.8 < sum(ours.values()) / sum(paper.values()) < 1
        assert ours["backbone"] < paper["backbone"]


def small(head: str) -> Config:
    """Wide enough that matrix products dominate; one layer of each kind, as XLA counts a loop's body once."""
    config = quickstart.get_config(f"head={head}")
    # Its cost depends on the vocabulary.
    assert config.lm.token_loss_weight
    model = config.lm.model
    model.hidden_size, model.intermediate_size, model.num_layers = 256, 688, 1
    model.num_heads = model.num_kv_heads = 4
    config.lm.data.block_tokens = 64
    config.autoencoder.model.hidden_size, config.autoencoder.model.intermediate_size = 256, 640
    if "num_blocks" in config.lm.head:
        config.lm.head.num_blocks = 1
    return resolve(config)


def counted(loss, *arguments) -> float:
    compiled = jax.jit(jax.grad(loss)).lower(*arguments).compile()
    return compiled.cost_analysis()["flops"]


def as_xla(config: Config, parts: flops.Flops) -> float:
    """Adds the attention over masked positions, which XLA's attention computes too."""
    num_chunks = config.lm.data.block_tokens // config.chunk_size
    seen = num_chunks - 1
    masked = flops.backbone(config.lm.model, seen) - flops.backbone(config.lm.model, (seen + 1) / 2)
    return sum(parts.values()) + 3 * masked * seen / num_chunks / config.chunk_size


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        "energy",
        pytest.param("flow", marks=pytest.mark.slow),
        pytest.param("diffusion", marks=pytest.mark.slow),
    ],
)
def test_flops_of_a_small_lm_step_equal_xlas_count(head):
    tokenizer, config, rows = ByteTokenizer(b""), small(head), 8
    task = make_lm_task(config, tokenizer)
    params = jax.eval_shape(task.init, jax.random.key(0))
    frozen = {
        "params": jax.eval_shape(make_autoencoder_task(config, tokenizer).init, jax.random.key(0))
    }
    tokens = jnp.zeros((rows, config.lm.data.block_tokens), jnp.int32)
    key_B = jax.random.split(jax.random.key(0), rows)

    def loss(params, frozen):
        batch = {"tokens": tokens, "targets": tokens}
        return task.loss(params, frozen, batch, key_B)["loss"][0]

    parts = flops.lm_training(config, tokenizer.vocab_size, Count.OURS)
    expected = as_xla(config, parts) * tokens.size
    assert counted(loss, params, frozen) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_flops_of_a_small_autoencoder_step_equal_xlas_count():
    tokenizer, config, rows = ByteTokenizer(b""), small("energy"), 8
    task = make_autoencoder_task(config, tokenizer)
    params = jax.eval_shape(task.init, jax.random.key(0))
    tokens = jnp.zeros((rows, config.autoencoder.data.block_tokens), jnp.int32)
    key_B = jax.random.split(jax.random.key(0), rows)

    def loss(params):
        return task.loss(params, {}, {"tokens": tokens, "targets": tokens}, key_B)["loss"][0]

    expected = sum(flops.autoencoder_training(config, tokenizer.vocab_size).values()) * tokens.size
    assert counted(loss, params) == pytest.approx(expected, rel=0.05)


def test_accelerators_are_found_by_jaxs_device_kind():
    assert accelerator("NVIDIA H100 80GB HBM3").flops == 989e12
    # Cards of the same chip with other rates.
    assert accelerator("NVIDIA H100 PCIe").flops == 756e12
    assert accelerator("NVIDIA A100-SXM4-40GB").memory == 40e9
    assert accelerator("TPU v5 lite").flops == 197e12
    assert accelerator("TPU v5p").flops == accelerator("TPU v5").flops == 459e12
    assert accelerator("cpu") is None


def test_logits_are_computed_again_where_a_device_cannot_hold_them():
    """Stage 1 of CALM-M and the baseline; 2^27 logits are those of 1046 positions."""
    tree = calm_m.get_config("head=softmax")
    tree.lm.model.remat = "none"
    tree.lm.training.accumulation_steps = 8
    baseline = resolve(tree)
    # 8 microbatches of 32 rows of 8192 tokens.
    assert flops.recomputed(baseline, "lm", VOCABULARY, 32) == 2 * 1024 * VOCABULARY
    assert flops.recomputed(baseline, "lm", VOCABULARY, 256) == 0
    tree = calm_m.get_config()
    tree.lm.model.remat = "none"
    tree.autoencoder.training.accumulation_steps = tree.lm.training.accumulation_steps = 1
    calm = resolve(tree)
    assert flops.recomputed(calm, "autoencoder", VOCABULARY, 8) == 2 * 512 * VOCABULARY
    assert flops.recomputed(calm, "autoencoder", 512, 8) == 0
    # CALM's own loss has no logits.
    assert flops.recomputed(calm, "lm", VOCABULARY, 8) == 0
