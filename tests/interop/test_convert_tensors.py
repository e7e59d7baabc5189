"""Conversion of checkpoints whose tensors are tied, aliased, missing, damaged or unknown, and of separate autoencoders."""

import numpy as np
import pytest

from calm_jax.interop import names
from calm_jax.interop.converted import print_notes
from tests.interop.checkpoints import (
    CHECKPOINTS,
    assert_same,
    changed,
    drop,
    listing,
    refusal,
    tensors_of,
)
from tests.interop.conversions import params

# --- Tied tensors and aliases


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("has_output", [True, False])
def test_a_tied_llama_gets_its_embedding_as_output_projection(
    has_output, golden, converted, tmp_path
):
    def tie(tensors):
        del tensors["lm_head.weight"]
        if has_output:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    source = changed(golden / "ar", tmp_path / "tied", TIED, tie)
    found = params(converted(source))
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found["lm/embed/embedding"], embedding)
    np.testing.assert_array_equal(found["lm/head/kernel"], embedding.T)


def test_a_tied_llama_whose_output_is_not_its_embedding_is_refused(golden, converted, tmp_path):
    source = changed(golden / "ar", tmp_path / "tied", TIED)
    line = refusal(converted, source)
    assert "lm_head.weight" in line and "model.embed_tokens.weight" in line


def test_an_untied_llama_without_output_projection_is_refused(golden, plan_of, tmp_path):
    source = changed(golden / "ar", tmp_path / "untied", {}, drop("lm_head"))
    assert "no tensor lm_head.weight" in refusal(plan_of, source)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dropped", ["generative_head.", pytest.param("mlp_generator.", marks=pytest.mark.slow)]
)
def test_the_head_is_found_under_either_alias(dropped, golden, converted, tmp_path):
    source = changed(golden / "energy_k4", tmp_path / "half", {}, drop(dropped))
    assert_same(params(converted(source)), params(converted(golden / "energy_k4", name="other")))


@pytest.mark.slow
@pytest.mark.parametrize("dropped", ["decoder.lm_head_weight", "encoder.embed_tokens.weight"])
def test_the_embedding_is_found_under_either_alias(dropped, golden, converted, tmp_path):
    source = changed(golden / "ae_k2", tmp_path / "half", {}, drop(dropped))
    assert_same(params(converted(source)), params(converted(golden / "ae_k2", name="other")))


@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("energy_k4", "generative_head.final_layer.linears.2.bias"),
        ("energy_k4", "mlp_generator.mlp_blocks.1.linears.2.weight"),
        ("energy_k4", "ae_model.decoder.lm_head_weight"),
        ("ae_k4", "decoder.lm_head_weight"),
    ],
)
def test_copies_that_differ_are_refused(checkpoint, name, golden, converted, tmp_path):
    def change(tensors):
        tensors[name].flat[0] += 1e-6

    source = changed(golden / checkpoint, tmp_path / "source", {}, change)
    before = listing(tmp_path)
    assert name in refusal(converted, source) or names.alias(name) in refusal(converted, source)
    assert listing(tmp_path) == before


def test_copies_that_differ_in_the_sign_of_zero_are_refused(golden, converted, tmp_path):
    def change(tensors):
        tensors["encoder.embed_tokens.weight"].flat[0] = 0.0
        tensors["decoder.lm_head_weight"].flat[0] = -0.0

    source = changed(golden / "ae_k4", tmp_path / "source", {}, change)
    assert "decoder.lm_head_weight" in refusal(converted, source)


# --- Unknown, missing and wrong tensors


@pytest.mark.slow
def test_unused_tensors_are_listed(golden, plan_of, tmp_path, capsys):
    def change(tensors):
        tensors["ema.step"] = np.zeros(2, np.int64)
        tensors["transformer.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    plan = plan_of(changed(golden / "energy_k4", tmp_path / "source", {}, change))
    extra = ["ema.step", "transformer.layers.0.self_attn.rotary_emb.inv_freq"]
    assert sorted(plan.left_over) == extra
    print_notes(plan)
    shown = capsys.readouterr().out
    assert all(f"left over, not used: {name!r}" in shown for name in extra)
    for name in CHECKPOINTS:
        assert plan_of(golden / name).left_over == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "name"),
    [
        ("energy_k4", "transformer.layers.1.mlp.up_proj.weight"),
        ("energy_k4", "embed_proj.3.bias"),
        ("energy_k4", "ae_model.decoder.norm.weight"),
        ("ae_k4", "encoder.squeeze_layer.weight"),
        ("flow", "generative_head.net.res_blocks.1.mlp.0.bias"),
        ("ar", "model.norm.weight"),
    ],
)
def test_a_missing_tensor_or_one_of_wrong_shape_or_dtype_is_refused_by_name(
    checkpoint, name, golden, plan_of, converted, tmp_path
):
    def cut(tensors):
        tensors[name] = tensors[name][:-1]

    def whole(tensors):
        tensors[name] = tensors[name].astype(np.int32)

    source = changed(golden / checkpoint, tmp_path / "missing", {}, drop(name))
    assert name in refusal(plan_of, source)
    source = changed(golden / checkpoint, tmp_path / "cut", {}, cut)
    assert name in refusal(plan_of, source)
    source = changed(golden / checkpoint, tmp_path / "whole", {}, whole)
    assert name in refusal(converted, source)


@pytest.mark.slow
def test_a_nonzero_embedding_of_the_pad_token_is_refused(golden, converted, tmp_path):
    """PyTorch would use the stored row; the model here embeds pads as zero."""

    def change(tensors):
        tensors["transformer.embed_tokens.weight"][96, 0] = 1

    source = changed(golden / "flow", tmp_path / "source", {}, change)
    assert "row 96 of transformer.embed_tokens.weight" in refusal(converted, source)
    assert not (tmp_path / "converted").exists()


# --- The autoencoder of a language model


WITHOUT_AUTOENCODER = drop("ae_model.")


@pytest.mark.slow
def test_a_separate_autoencoder_gives_the_same_parameters_as_the_included_one(
    golden, converted, tmp_path
):
    expected = params(converted(golden / "energy_k4"))
    assert_same(params(converted(golden / "energy_k4", golden / "ae_k4", name="both")), expected)
    alone = changed(golden / "energy_k4", tmp_path / "alone", {}, WITHOUT_AUTOENCODER)
    workdir = converted(alone, golden / "ae_k4", name="apart")
    assert_same(params(workdir), expected)


@pytest.mark.slow
def test_a_separate_autoencoders_config_sets_dropout_and_kl_weight(golden, plan_of, tmp_path):
    own = changed(golden / "ae_k4", tmp_path / "own", {"ae_dropout": 0.25, "kl_weight": 0.5})
    plan = plan_of(golden / "energy_k4", own)
    model = plan.config.autoencoder.model
    assert (model.dropout, model.kl_weight) == (0.25, 0.5)
    assert not plan.notes and "--autoencoder" in plan_of(golden / "energy_k4").notes[0]


def test_a_separate_autoencoder_that_differs_from_the_included_one_is_refused(
    golden, converted, tmp_path
):
    name = "decoder.expand_layer.bias"

    def change(tensors):
        tensors[name][5] += 1e-6

    other = changed(golden / "ae_k4", tmp_path / "other", {}, change)
    line = refusal(converted, golden / "energy_k4", other)
    assert name in line and str(other) in line
    assert not (tmp_path / "converted").exists()


def test_a_missing_autoencoder_is_refused_with_its_ae_path(golden, plan_of, tmp_path):
    alone = changed(
        golden / "energy_k4", tmp_path / "alone", {"ae_path": "where/ae_is"}, WITHOUT_AUTOENCODER
    )
    line = refusal(plan_of, alone)
    assert "--autoencoder" in line and "where/ae_is" in line


def test_an_incomplete_included_autoencoder_is_refused(golden, plan_of, tmp_path):
    half = changed(golden / "energy_k4", tmp_path / "half", {}, drop("ae_model.encoder."))
    assert "ae_model.encoder." in refusal(plan_of, half)


@pytest.mark.parametrize(
    ("autoencoder", "config", "key"),
    [
        ("ae_k2", {}, "patch_size"),
        ("ae_k4", {"latent_size": 16}, "latent_size"),
        ("ae_k4", {"vocab_size": 98}, "vocab_size"),
        ("energy_k4", {}, "EnergyTransformer"),
        ("ar", {}, "LlamaForCausalLM"),
    ],
)
@pytest.mark.parametrize("keeps_inside", [True, False])
def test_an_autoencoder_of_other_sizes_or_another_kind_is_refused(
    autoencoder, config, key, keeps_inside, golden, plan_of, tmp_path
):
    other = changed(golden / autoencoder, tmp_path / "other", config)
    tensors = None if keeps_inside else WITHOUT_AUTOENCODER
    source = changed(golden / "energy_k4", tmp_path / "source", {}, tensors)
    assert key in refusal(plan_of, source, other)


@pytest.mark.parametrize("name", ["ae_k4", "ar"])
def test_an_autoencoder_or_a_llama_takes_no_autoencoder(name, golden, plan_of):
    assert "--autoencoder" in refusal(plan_of, golden / name, golden / "ae_k4")
