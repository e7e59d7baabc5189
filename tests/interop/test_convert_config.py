"""Conversion reads config.json, the tokenizer and the user's keys: what it refuses, and what becomes of the rest."""

import dataclasses
import shutil

import pytest

from calm_jax.build import make_lm_task
from calm_jax.data.tokenizers import Vocabulary
from calm_jax.interop import published
from tests.interop.checkpoints import changed, refusal
from tests.interop.conversions import SPECIAL, sentencepiece_model

# --- config.json


# (checkpoint, changed keys of config.json, words of the refusal)
REFUSED = [
    ("energy_k4", {"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
    ("energy_k4", {"attention_bias": True}, "attention_bias"),
    ("energy_k4", {"mlp_bias": True}, "mlp_bias"),
    ("energy_k4", {"hidden_act": "gelu"}, "hidden_act"),
    ("energy_k4", {"hidden_act": None}, "hidden_act"),
    ("energy_k4", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("energy_k4", {"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    ("energy_k4", {"head_dim": 16}, "head_dim"),
    ("energy_k4", {"num_hidden_layers": 3}, "transformer.layers.2"),
    ("energy_k4", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": 2**24}, "layers"),
    ("energy_k4", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": -1}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": "2"}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": 2.0}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": None}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": ...}, "num_hidden_layers"),
    ("energy_k4", {"num_hidden_layers": [2]}, "num_hidden_layers"),
    ("energy_k4", {"num_mlp_layers": 10**9}, "num_mlp_layers"),
    ("energy_k4", {"num_mlp_layers": 2**24}, "layers"),
    ("energy_k4", {"hidden_size": 10**9}, "hidden_size"),
    ("energy_k4", {"hidden_size": 2**24}, "hape"),
    ("energy_k4", {"hidden_size": 10**400}, "hidden_size"),
    ("energy_k4", {"hidden_size": 40}, "hape"),
    ("energy_k4", {"intermediate_size": 2**24}, "hape"),
    ("energy_k4", {"num_attention_heads": 3}, "num_heads"),
    ("energy_k4", {"num_attention_heads": 32}, "num_heads"),
    ("energy_k4", {"num_key_value_heads": 3}, "num_kv_heads"),
    ("energy_k4", {"num_key_value_heads": 2}, "k_proj"),
    ("energy_k4", {"num_key_value_heads": 8}, "num_kv_heads"),
    ("energy_k4", {"latent_size": 4}, "latent_size"),
    ("energy_k4", {"patch_size": 2}, "patch_size"),
    ("energy_k4", {"patch_size": 2**24}, "patch_size"),
    ("energy_k4", {"vocab_size": 2**24}, "vocab_size"),
    ("energy_k4", {"vocab_size": "97"}, "vocab_size"),
    ("energy_k4", {"noise_size": 3}, "noise_embd"),
    ("energy_k4", {"beta": 0.0}, "beta"),
    ("energy_k4", {"beta": "1"}, "beta"),
    ("energy_k4", {"beta": float("nan")}, "beta"),
    ("energy_k4", {"num_samples": 1}, "num_samples"),
    ("energy_k4", {"rope_theta": -1.0}, "rope_theta"),
    ("energy_k4", {"rope_theta": None}, "rope_theta"),
    ("energy_k4", {"architectures": ["BertModel"]}, "BertModel"),
    ("energy_k4", {"architectures": []}, "architectures"),
    ("energy_k4", {"architectures": [{}]}, "architectures"),
    ("energy_k4", {"architectures": None}, "architectures"),
    ("energy_k4", {"architectures": ...}, "architectures"),
    ("energy_k4", {"architectures": ["DiffusionTransformer"]}, "generative_head.net"),
    ("energy_k4", {"architectures": ["LlamaForCausalLM"]}, "model."),
    ("energy_k4", {"architectures": ["Autoencoder"]}, "encoder"),
    ("ae_k4", {"num_encoder_layers": 3}, "num_encoder_layers"),
    ("ae_k4", {"num_decoder_layers": 0}, "num_decoder_layers"),
    ("ae_k4", {"num_decoder_layers": 10**9}, "num_decoder_layers"),
    ("ae_k4", {"num_decoder_layers": 2**24}, "layers"),
    ("ae_k4", {"num_encoder_layers": 4}, "encoder.encoder_layers"),
    ("ae_k4", {"ae_dropout": 1.5}, "dropout"),
    ("ae_k4", {"ae_dropout": "0.1"}, "ae_dropout"),
    ("ae_k4", {"kl_weight": -1}, "kl_weight"),
    ("ae_k4", {"patch_size": 8}, "squeeze_layer"),
    ("ae_k4", {"patch_size": 2**24}, "block"),
    ("ae_k4", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("ar", {"rms_norm_eps": 0}, "rms_norm_epsilon"),
    ("ar", {"head_dim": 16}, "head_dim"),
    ("ar", {"head_dim": "8"}, "head_dim"),
    ("ar", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
    ("ar", {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3"}}, "rope_parameters"),
    ("ar", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
    ("ar", {"rope_theta": ...}, "rope_theta"),
    ("ar", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("flow", {"num_samples": 0}, "num_samples"),
]


@pytest.mark.parametrize(
    ("checkpoint", "keys", "words"), REFUSED, ids=[f"{c}-{str(k)[:40]}" for c, k, _ in REFUSED]
)
def test_an_unsupported_or_wrong_key_is_refused_by_name(
    checkpoint, keys, words, golden, plan_of, tmp_path
):
    source = changed(golden / checkpoint, tmp_path / "source", keys)
    assert words in refusal(plan_of, source)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 10**5, '{"architectures": ' + "9" * 9999 + "}"]
)
def test_a_config_json_that_is_no_object_is_refused(text, golden, plan_of, tmp_path):
    source = changed(golden / "ar", tmp_path / "source")
    (source / "config.json").write_text(text)
    assert "config.json" in refusal(plan_of, source)
    (source / "config.json").unlink()
    assert "config.json" in refusal(plan_of, source)


def test_keys_as_other_versions_of_transformers_write_them_mean_the_same(golden, plan_of, tmp_path):
    expected = plan_of(golden / "ar").config.lm
    for number, keys in enumerate(
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
            {"head_dim": 8, "rope_scaling": ..., "attention_bias": ..., "mlp_bias": ...},
            {"tie_word_embeddings": ..., "pad_token_id": None, "architectures": "LlamaForCausalLM"},
        )
    ):
        source = changed(golden / "ar", tmp_path / str(number), keys)
        assert plan_of(source).config.lm == expected
    source = changed(golden / "ar", tmp_path / "epsilon", {"rms_norm_eps": 1e-5})
    assert plan_of(source).config.lm.model.rms_norm_epsilon == 1e-5


def test_rms_norms_have_the_epsilon_of_the_checkpoint_and_layer_norms_the_hard_coded_one(
    golden, plan_of, tmp_path
):
    source = changed(golden / "energy_k4", tmp_path / "epsilon", {"rms_norm_eps": 1e-3})
    config = plan_of(source).config
    assert (config.lm.model.rms_norm_epsilon, config.lm.model.norm_epsilon) == (1e-3, 1e-6)
    task = make_lm_task(config, Vocabulary(8, 7))
    assert task.model.head.norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 10**400), ("ae_path", "x" * 5000), ("ae_path", "a\0b"), ("beta", 10**400)],
)
def test_absurd_values_are_refused_by_name_or_ignored(key, value, golden, plan_of, tmp_path):
    source = changed(golden / "energy_k2", tmp_path / "source", {key: value})
    if key == "ae_path":
        assert plan_of(source).parts
    else:
        assert key in refusal(plan_of, source)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ar", "flow"])
def test_the_context_length_comes_from_the_checkpoint(name, golden, plan_of, tmp_path):
    source = changed(golden / name, tmp_path / "source", {"max_position_embeddings": 100})
    config = plan_of(source).config
    assert config.lm.data.block_tokens == 100 * config.chunk_size
    values = published.lm_values(config, plan_of(source).tokenizer, "x")
    assert values["max_position_embeddings"] == 100


# --- The user's keys


def test_the_user_cannot_change_keys_of_the_model(golden, plan_of):
    for key, value in {
        "chunk_size": 8,
        "lm__model__num_layers": 1,
        "lm__head__beta": 0.5,
        "lm__head__name": "flow",
        "lm__head__num_steps": 3,
        "tokenizer__kind": "bytes",
        "autoencoder__model__dropout": 0.5,
    }.items():
        line = refusal(plan_of, golden / "energy_k4", **{key: value})
        assert f"--config.{key.replace('__', '.')}" in line and "the checkpoint decides" in line


def test_the_user_can_set_other_keys(golden, plan_of):
    free = {"lm__model__remat": "full", "lm__model__attention": "xla"}
    plan = plan_of(golden / "energy_k4", seed=5, compute_dtype="float32", **free)
    assert (plan.config.seed, plan.config.compute_dtype) == (5, "float32")
    model = plan.config.lm.model
    assert (model.remat, model.attention) == ("full", "xla")


@pytest.mark.parametrize("key", ["init_from", "autoencoder__checkpoint"])
def test_the_user_cannot_name_another_source_of_parameters(key, golden, plan_of):
    assert key.replace("__", ".") in refusal(plan_of, golden / "flow", **{key: "runs/x"})


def test_the_mesh_of_the_conversion_is_not_stored_in_the_workdir(golden, converted):
    workdir = converted(golden / "ar", mesh__data=1)
    assert dataclasses.asdict(workdir.config.mesh) == {"data": -1, "fsdp": 1, "tensor": 1}


# --- Tokenizers


def test_a_tokenizer_of_other_size_or_special_ids_is_refused(golden, plan_of, tmp_path):
    line = refusal(plan_of, golden / "energy_k4", tokenizer="bytes")
    assert "vocab_size=97" in line and "259" in line and "--tokenizer" in line
    for key, place in (("bos_token_id", "bos_id"), ("eos_token_id", "eos_id")):
        other = tmp_path / "other.model"
        # Two of the three special ids swapped.
        ids = SPECIAL | {place: 96, "pad_id": SPECIAL[place]}
        other.write_bytes(sentencepiece_model(**ids))
        assert key in refusal(plan_of, golden / "energy_k4", tokenizer=other)


def test_a_model_whose_vocabulary_has_no_pad_is_refused_for_that(golden, plan_of, tmp_path):
    """As Meta's Llama 3, whose tokenizer is one token larger here."""
    padless = tmp_path / "padless.model"
    padless.write_bytes(sentencepiece_model(bos_id=94, eos_id=95))
    line = refusal(plan_of, golden / "ar", tokenizer=padless)
    assert "vocab_size=97, the tokenizer 98" in line and "has no pad token" in line
    assert "--tokenizer" not in line


def test_a_missing_tokenizer_is_refused_with_a_hint(golden, plan_of):
    assert "--tokenizer=FILE" in refusal(plan_of, golden / "energy_k4", tokenizer="")


def test_a_file_that_is_no_tokenizer_is_refused(golden, plan_of, tmp_path):
    for content in (b"", b"\x00\x01" * 50, b"{}", b"{" * 9999, b"QQ== 0\n", b"QQ== x\n"):
        path = tmp_path / "tokenizer"
        path.write_bytes(content)
        assert "tokenizer" in refusal(plan_of, golden / "energy_k4", tokenizer=path)
    assert "nowhere" in refusal(plan_of, golden / "energy_k4", tokenizer=tmp_path / "nowhere")


def test_the_tokenizer_beside_the_weights_is_found(golden, plan_of, tokenizer_file, tmp_path):
    source = changed(golden / "ar", tmp_path / "source")
    (source / "original").mkdir()
    shutil.copy(tokenizer_file, source / "original")
    plan = plan_of(source, tokenizer="")
    assert plan.tokenizer.model == tokenizer_file.read_bytes()
    assert plan.config.tokenizer.kind == "sentencepiece"
