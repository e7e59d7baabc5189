"""Every recipe resolves to a valid config; every bad value is refused in one line with its key."""

import ast
import dataclasses
import importlib
import json
import logging
import pathlib
import types

import pytest

import configs
from calm_jax import build
from calm_jax.config import (
    Config,
    as_dict,
    as_json,
    differing_keys,
    leaves,
    resolve,
    resolve_stored,
)
from calm_jax.errors import UserError
from calm_jax.evaluation import evaluator
from calm_jax.models.heads import HEADS, LATENT_HEADS
from calm_jax.run.workdir import Workdir
from calm_jax.training import loop
from configs import common, quickstart
from configs import workdir as stored
from tests.models.networks import count

RECIPES = sorted(
    path.stem
    for path in pathlib.Path(configs.__file__).parent.glob("*.py")
    # workdir and finetune need a folder, and are tested with one.
    if path.stem not in ("__init__", "workdir", "finetune")
)


# Recipes that take arguments for the head and the chunk size.
VARIABLE = [name for name in RECIPES if name != "common" and not name.startswith("ar_")]
BASELINES = [name for name in RECIPES if name.startswith("ar_")]
CHUNK_SIZES = [1, 2, 3, 4, 8, 16]


def tree_with(changes, name="common", arguments=""):
    """A recipe as a nested dict with some keys set or added, whatever their type."""
    get_config = importlib.import_module(f"configs.{name}").get_config
    tree = (get_config(arguments) if arguments else get_config()).to_dict()
    tree["tokenizer"]["path"] = tree["tokenizer"]["path"] or "tokenizer.model"
    if tree["tokenizer"]["kind"] != "llama3":
        tree["tokenizer"]["path"] = ""
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[last] = value
    return tree


def refusal(tree):
    """The error that resolving a config raises, which must be one line."""
    with pytest.raises(UserError) as caught:
        resolve(tree)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_to_its_own_values(name):
    tree = tree_with({}, name)
    config = resolve(tree)
    assert isinstance(config, Config)
    assert as_dict(config) == tree
    # A recipe may change values of `common` but add no keys, except those of another head.
    head = {key for key in dict(leaves(tree)) if key.startswith("lm.head.")}
    assert set(dict(leaves(tree))) - head <= set(dict(leaves(common.get_config().to_dict())))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "common"])
def test_the_docstring_of_a_recipe_has_the_command_that_runs_it(name):
    assert f"--config=configs/{name}.py" in importlib.import_module(f"configs.{name}").__doc__


# The key as the message spells it, and the keys to set. The message must show the value of the first one.
BAD = [
    ("seed", {"seed": -1}),
    ("stage", {"stage": "both"}),
    ("compute_dtype", {"compute_dtype": "float16"}),
    ("chunk_size", {"chunk_size": 0}),
    # Sizes that would fill the memory, or overflow.
    ("lm.data.block_tokens", {"lm.data.block_tokens": 2**40}),
    ("lm.data.block_tokens", {"lm.data.block_tokens": 2**24 + 4}),
    ("lm.training.batch_size", {"lm.training.batch_size": 10**12}),
    ("lm.training.batch_size", {"lm.training.batch_size": 2**16}),
    ("autoencoder.training.batch_size", {"autoencoder.training.batch_size": 2**18}),
    ("eval.batch_size", {"eval.batch_size": 2**16}),
    ("lm.model.hidden_size", {"lm.model.hidden_size": 2**62}),
    ("lm.head.num_target_samples", {"lm.head.num_target_samples": 10**12}),
    ("lm.training.num_steps", {"lm.training.num_steps": 2**31}),
    ("lm.optimizer.warmup_steps", {"lm.optimizer.warmup_steps": 2**31}),
    # Sizes that do not fit together.
    ("autoencoder.data.block_tokens", {"autoencoder.data.block_tokens": 2046}),
    ("lm.data.block_tokens", {"lm.data.block_tokens": 8190}),
    ("lm.data.block_tokens", {"lm.data.block_tokens": 4}),
    ("lm.data.block_tokens", {"lm.data.block_tokens": 0}),
    ("autoencoder.data.block_tokens", {"autoencoder.data.block_tokens": 100, "chunk_size": 8}),
    ("lm.model.hidden_size", {"lm.model.hidden_size": 1000}),
    ("lm.model.hidden_size", {"lm.model.hidden_size": 48}),  # an odd number of features a head
    ("lm.model.hidden_size", {"lm.model.hidden_size": 0}),
    ("lm.model.intermediate_size", {"lm.model.intermediate_size": -1}),
    ("lm.model.num_layers", {"lm.model.num_layers": 0}),
    ("lm.model.num_heads", {"lm.model.num_heads": 0}),
    ("lm.model.num_kv_heads", {"lm.model.num_kv_heads": 3}),
    ("lm.model.num_kv_heads", {"lm.model.num_kv_heads": 32}),
    ("lm.model.num_kv_heads", {"lm.model.num_kv_heads": 0}),
    ("autoencoder.model.num_encoder_layers", {"autoencoder.model.num_encoder_layers": 3}),
    ("autoencoder.model.num_encoder_layers", {"autoencoder.model.num_encoder_layers": 0}),
    ("autoencoder.model.num_decoder_layers", {"autoencoder.model.num_decoder_layers": 1}),
    ("autoencoder.model.latent_size", {"autoencoder.model.latent_size": 0}),
    ("autoencoder.model.hidden_size", {"autoencoder.model.hidden_size": 0}),
    ("autoencoder.model.intermediate_size", {"autoencoder.model.intermediate_size": 0}),
    ("autoencoder.model.dropout", {"autoencoder.model.dropout": 1.0}),
    ("autoencoder.model.dropout", {"autoencoder.model.dropout": -0.1}),
    # The energy score.
    ("lm.head.num_samples", {"lm.head.num_samples": 1}),
    ("lm.head.num_target_samples", {"lm.head.num_target_samples": -1}),
    ("lm.head.num_blocks", {"lm.head.num_blocks": 0}),
    ("lm.head.noise_size", {"lm.head.noise_size": 0}),
    ("lm.head.beta", {"lm.head.beta": 0.0}),
    ("lm.head.beta", {"lm.head.beta": -0.5}),
    ("lm.head.beta", {"lm.head.beta": 2.01}),
    ("lm.head.beta", {"lm.head.beta": float("nan")}),
    ("lm.token_loss_weight", {"lm.token_loss_weight": -1.0}),
    ("lm.token_prior_weight", {"lm.token_prior_weight": -1.0}),
    (
        "lm.token_prior_weight",
        {"lm.token_prior_weight": 2.0, "lm.token_loss_weight": 0.0},
    ),
    # Data.
    ("tokenizer.kind", {"tokenizer.kind": "gpt2"}),
    ("tokenizer.path", {"tokenizer.path": "x", "tokenizer.kind": "bytes"}),
    (
        "tokenizer.vocab_size",
        {
            "tokenizer.vocab_size": 299,
            "tokenizer.kind": "sentencepiece",
            "tokenizer.path": "",
        },
    ),
    ("data.on_bad_record", {"data.on_bad_record": "ignore"}),
    ("data.holdout_every", {"data.holdout_every": 1}),
    ("autoencoder.data.front_fill", {"autoencoder.data.front_fill": "always"}),
    ("lm.data.front_fill", {"lm.data.front_fill": ""}),
    # Training, in both stages.
    ("lm.optimizer.schedule", {"lm.optimizer.schedule": "linear"}),
    ("autoencoder.optimizer.schedule", {"autoencoder.optimizer.schedule": "linear"}),
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": 0.0}),
    ("lm.optimizer.warmup_steps", {"lm.optimizer.warmup_steps": -1}),
    ("autoencoder.optimizer.max_grad_norm", {"autoencoder.optimizer.max_grad_norm": 0.0}),
    ("lm.training.num_steps", {"lm.training.num_steps": 0}),
    ("autoencoder.training.log_every", {"autoencoder.training.log_every": 0}),
    ("lm.training.checkpoint_every", {"lm.training.checkpoint_every": -5}),
    ("lm.training.batch_size", {"lm.training.batch_size": 10, "lm.training.accumulation_steps": 4}),
    (
        "autoencoder.training.batch_size",
        {"autoencoder.training.batch_size": 9, "autoencoder.training.accumulation_steps": 2},
    ),
    # Evaluation, sampling, the run.
    ("eval.num_samples", {"eval.num_samples": 1}),
    ("eval.batch_size", {"eval.batch_size": 0}),
    ("eval.part_blocks", {"eval.part_blocks": 0}),
    ("eval.start_every", {"eval.start_every": 0}),
    ("eval.context_tokens", {"eval.context_tokens": 0}),
    # No n-gram of four tokens follows the context.
    ("eval.context_tokens", {"eval.context_tokens": 2045}),
    ("eval.context_tokens", {"eval.context_tokens": 2048}),
    ("eval.context_tokens", {"eval.context_tokens": 4096}),
    ("eval.block_tokens", {"eval.block_tokens": 1024}),
    ("sample.temperature", {"sample.temperature": 0.0}),
    ("sample.temperature", {"sample.temperature": -1.0}),
    ("sample.temperature", {"sample.temperature": 1.25}),
    # A latent head supports no T above 1 and no top_p.
    ("sample.temperature", {"sample.temperature": 2.0}),
    ("sample.top_p", {"sample.top_p": 0.9}),
    ("sample.top_p", {"sample.top_p": 0.0}),
    ("sample.top_p", {"sample.top_p": 1.5}),
    ("num_candidates", {"sample.num_candidates": 0}),
    ("max_draws", {"sample.max_draws": 0}),
    ("draws_at_once", {"sample.draws_at_once": 0}),
    ("sample.sampler", {"sample.sampler": "greedy"}),
    # Temperatures that a sampler does not support, or not with so few draws.
    ("sample.temperature", {"sample.temperature": 0.7, "sample.sampler": "published"}),
    ("max_draws", {"sample.max_draws": 4, "sample.temperature": 0.2}),
    ("max_draws", {"sample.max_draws": 2, "sample.temperature": 0.4, "sample.sampler": "growing"}),
    ("max_tokens", {"sample.max_tokens": 0}),
    ("batch_size", {"sample.batch_size": 0}),
    ("stop", {"sample.stop": ""}),
    ("long_context", {"sample.long_context": "cut"}),
    ("sample.stop", {"sample.stop": [1]}),
    ("prompt_alignment", {"sample.prompt_alignment": "right"}),
    ("checkpoint.keep", {"checkpoint.keep": 0}),
    ("data", {"mesh.data": 0}),
    ("tensor", {"mesh.tensor": -1, "mesh.data": -1}),
    # Wrong types.
    ("seed", {"seed": 0.5}),
    ("seed", {"seed": True}),
    ("stage", {"stage": 3}),
    ("chunk_size", {"chunk_size": "4"}),
    ("lm.model.remat", {"lm.model.remat": True}),
    ("lm.model.num_layers", {"lm.model.num_layers": 16.0}),
    ("lm.head.beta", {"lm.head.beta": "1"}),
    ("lm.head.num_samples", {"lm.head.num_samples": None}),
    ("sample.temperature", {"sample.temperature": "low"}),
    ("sample.prompts", {"sample.prompts": "abc"}),
    ("sample.prompts", {"sample.prompts": 3}),
    ("sample.prompts", {"sample.prompts": [1, 2]}),
    ("lm", {"lm": 3}),
    ("lm.head", {"lm.head": 3}),
    ("lm.head", {"lm.head": "energy"}),
    ("lm.head.name", {"lm.head.name": ["energy"]}),
    # Values with which training would diverge.
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": float("nan")}),
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": float("inf")}),
    ("lm.optimizer.beta1", {"lm.optimizer.beta1": 1.5}),
    ("lm.optimizer.beta2", {"lm.optimizer.beta2": 1.0}),
    ("lm.optimizer.beta2", {"lm.optimizer.beta2": 0.99999999}),
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": 1.5}),
    ("lm.optimizer.final_learning_rate", {"lm.optimizer.final_learning_rate": 2.0}),
    ("lm.optimizer.weight_decay", {"lm.optimizer.weight_decay": 4000.0}),
    (
        "lm.optimizer.weight_decay",
        {"lm.optimizer.weight_decay": 10.0, "lm.optimizer.learning_rate": 0.2},
    ),
    ("lm.optimizer.max_grad_norm", {"lm.optimizer.max_grad_norm": 1e11}),
    ("lm.optimizer.weight_decay", {"lm.optimizer.weight_decay": -1.0}),
    ("lm.optimizer.epsilon", {"lm.optimizer.epsilon": 0.0}),
    ("lm.optimizer.epsilon", {"lm.optimizer.epsilon": 1e-40}),
    ("lm.optimizer.final_learning_rate", {"lm.optimizer.final_learning_rate": -1.0}),
    ("lm.model.rope_theta", {"lm.model.rope_theta": 0.0}),
    ("lm.model.rope_theta", {"lm.model.rope_theta": 1e-50}),
    ("lm.model.norm_epsilon", {"lm.model.norm_epsilon": 0.0}),
    ("lm.token_loss_weight", {"lm.token_loss_weight": 1e39}),
    ("lm.token_prior_weight", {"lm.token_prior_weight": 1e39, "lm.token_loss_weight": 1.0}),
    ("autoencoder.model.kl_weight", {"autoencoder.model.kl_weight": float("nan")}),
    ("autoencoder.checkpoint", {"autoencoder.checkpoint": "runs/other", "stage": "autoencoder"}),
    ("lm.model.norm_epsilon", {"lm.model.norm_epsilon": -1.0}),
    ("lm.model.rms_norm_epsilon", {"lm.model.rms_norm_epsilon": 0.0}),
    ("autoencoder.model.kl_weight", {"autoencoder.model.kl_weight": -1.0}),
    ("autoencoder.min_accuracy", {"autoencoder.min_accuracy": 2.0}),
    ("autoencoder.random_chunks", {"autoencoder.random_chunks": -0.1}),
]


@pytest.mark.parametrize(
    ("key", "changes"), BAD, ids=[f"{next(iter(c))}={next(iter(c.values()))!r}" for _, c in BAD]
)
def test_a_bad_value_is_refused_with_its_key_and_value(key, changes):
    value = next(iter(changes.values()))
    message = refusal(tree_with(changes))
    shown = (
        f"{value:g}"
        if key in ("sample.temperature", "sample.top_p") and not isinstance(value, str)
        else repr(value)
    )
    assert f"{key}={shown}" in message


@pytest.mark.parametrize("value", [10**400, -(10**400)])
def test_a_whole_number_that_no_float_holds_is_refused(value):
    for key, given in (("lm.optimizer.learning_rate", value), ("data.mixture", (1, value))):
        assert f"{key}=" in refusal(tree_with({key: given}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_tuple_holds_finite_numbers_only(value):
    for key in ("eval.temperatures", "data.mixture"):
        assert f"{key}=(1.0, {value}) must hold finite" in refusal(tree_with({key: (1.0, value)}))


@pytest.mark.parametrize("head", ["energy", "softmax"])
def test_a_prior_that_is_not_there_cannot_be_scaled(head):
    tree = quickstart.get_config(f"head={head}").to_dict()
    tree["lm"]["token_prior_weight"], tree["sample"]["token_prior_scale"] = 0.0, 4.0
    assert refusal(tree).startswith("sample.token_prior_scale=4 ")


def test_large_numbers_that_take_no_memory_are_values():
    changes = {"checkpoint.keep": 10**8, "eval.part_blocks": 10**9, "data.max_words": 10**9}
    assert resolve(tree_with(changes)).checkpoint.keep == 10**8
    weights = {"data.train_files": "a.txt,b.txt", "data.mixture": (3 * 10**8, 7 * 10**11)}
    assert resolve(tree_with(weights)).data.mixture == (3e8, 7e11)


def test_a_token_loss_is_refused_for_a_softmax_head():
    tree = quickstart.get_config("head=softmax")
    assert resolve(tree).lm.token_loss_weight == 0
    tree.lm.token_loss_weight = 0.5
    assert "lm.token_loss_weight=0.5: lm.head.name='softmax' predicts tokens itself" in refusal(
        tree
    )


def test_a_config_of_an_older_version_has_the_values_that_stand_for_what_it_did(tmp_path):
    older = as_dict(resolve(tree_with({})))
    del older["lm"]["token_loss_weight"], older["lm"]["token_prior_weight"]
    del older["lm"]["model"]["rms_norm_epsilon"], older["tokenizer"]["whitespace_pieces"]
    # There was one epsilon for both kinds of norms.
    older["lm"]["model"]["norm_epsilon"] = 1e-5
    config = resolve(older)
    assert config.lm.model.rms_norm_epsilon == config.lm.model.norm_epsilon == 1e-5
    assert config.lm.token_loss_weight == config.lm.token_prior_weight == 0
    assert config.tokenizer.whitespace_pieces is False
    # As a recipe it has the keys, so that flags can change them.
    (tmp_path / "config.json").write_text(json.dumps(older))
    tree = stored.get_config(str(tmp_path))
    assert tree.lm.token_loss_weight == tree.lm.token_prior_weight == 0
    assert resolve(tree) == config
    # Only the energy head has the key.
    older["lm"]["head"] = {"name": "flow", "num_blocks": 2, "num_samples": 4}
    with pytest.raises(UserError, match=r"lacks the key lm\.head\.num_steps"):
        resolve(older)


def test_a_stored_config_may_have_the_keys_of_a_removed_loss(tmp_path):
    expected = resolve(tree_with({}))
    older = as_dict(expected)
    older["lm"]["head"] |= {
        "decoded_brier_weight": 16.0,
        "decoded_brier_delay": 300,
        "decoded_brier_temperature": 3.0,
    }
    assert resolve_stored(older) == expected
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert Workdir(tmp_path).config == resolve(stored.get_config(str(tmp_path))) == expected
    # A recipe must not have them.
    assert "config has no key lm.head.decoded_brier_weight" in refusal(older)


@pytest.mark.parametrize("weight", [0.0, 16.0])
def test_a_run_that_was_trained_with_a_removed_loss_is_not_continued(weight, tmp_path):
    config = resolve(tree_with({}))
    older = as_dict(config)
    older["lm"]["head"]["decoded_brier_weight"] = weight
    (tmp_path / "config.json").write_text(json.dumps(older))
    Workdir(tmp_path).check_config(config, training=False)
    if not weight:
        Workdir(tmp_path).check_config(config, training=True)
        return
    with pytest.raises(UserError, match=r"was trained with lm\.head\.decoded_brier_weight=16\.0"):
        Workdir(tmp_path).check_config(config, training=True)


def test_integers_are_accepted_for_float_keys():
    config = resolve(tree_with({"lm.head.beta": 1, "lm.optimizer.learning_rate": 1}))
    assert type(config.lm.head.beta) is float and type(config.lm.optimizer.learning_rate) is float


def test_the_bounds_of_a_range_are_accepted():
    changes = {
        "lm.head.beta": 2.0,
        "lm.head.num_samples": 2,
        "lm.head.num_target_samples": 0,
        "lm.model.num_kv_heads": 1,
        "lm.data.block_tokens": 8,
        "sample.temperature": 1.0,
        "lm.optimizer.warmup_steps": 0,
        "autoencoder.model.dropout": 0.0,
    }
    config = resolve(tree_with(changes))
    assert config.lm.head.beta == 2 and config.sample.temperature == 1


def test_beta_2_warns_and_a_smaller_one_does_not(caplog):
    with caplog.at_level(logging.WARNING, logger="absl"):
        resolve(tree_with({"lm.head.beta": 1.99}))
        assert not caplog.messages
        resolve(tree_with({"lm.head.beta": 2.0}))
    assert len(caplog.messages) == 1 and "lm.head.beta=2" in caplog.messages[0]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("sede", "seed"),
        ("lm.model.num_layer", "num_layers"),
        ("lm.head.betta", "beta"),
        ("autoencoder.optimizer.warmup", "warmup_steps"),
    ],
)
def test_the_error_for_an_unknown_key_names_a_similar_one(key, meant):
    assert f"no key {key}: did you mean {meant!r}?" in refusal(tree_with({key: 1}))


def test_the_error_for_an_unknown_key_lists_all_if_none_is_similar():
    message = refusal(tree_with({"mesh.xyz": 1}))
    assert "no key mesh.xyz:" in message and "data, fsdp, tensor" in message


@pytest.mark.parametrize("key", ["seed", "lm", "lm.head.beta", "autoencoder.training.num_steps"])
def test_the_error_for_a_missing_key_names_it(key):
    tree = tree_with({})
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node[section]
    del node[last]
    assert f"lacks the key {key}" in refusal(tree)


def test_the_error_for_an_unknown_head_lists_all_heads():
    message = refusal(tree_with({"lm.head.name": "zzz"}))
    assert message.startswith("lm.head.name='zzz'")
    assert message.endswith(", ".join(HEADS))


def test_a_head_without_a_name_is_refused():
    tree = tree_with({})
    del tree["lm"]["head"]["name"]
    assert refusal(tree).endswith("lacks the key lm.head.name")


def test_prompt_field_needs_train_files_eos_whole_chunks_and_another_text_field():
    fits = {
        "data.prompt_field": "prompt",
        "data.train_files": "x.jsonl",
        "lm.data.append_eos": True,
        "lm.data.align_documents_to_chunks": True,
    }
    assert resolve(tree_with(fits)).data.prompt_field == "prompt"
    for change in (
        {"data.train_files": ""},
        {"data.prompt_field": "text"},
        {"lm.data.append_eos": False},
        {"lm.data.align_documents_to_chunks": False},
    ):
        assert refusal(tree_with(fits | change)).startswith("data.prompt_field=")


def test_init_from_also_gives_the_autoencoder_of_stage_lm():
    assert resolve(tree_with({"init_from": "runs/x"})).autoencoder_source == ""
    alone = {"init_from": "runs/x", "stage": "lm"}
    assert resolve(tree_with(alone)).autoencoder_source == "runs/x"
    message = refusal(tree_with({"init_from": "runs/x", "autoencoder.checkpoint": "runs/y"}))
    assert message.startswith("autoencoder.checkpoint='runs/y': init_from='runs/x'")


# --- Variants: heads and chunk sizes as arguments of a recipe


def variant(arguments, name="calm_m"):
    return resolve(tree_with({}, name, arguments))


@pytest.mark.parametrize("name", VARIABLE)
def test_a_recipe_resolves_with_every_head_and_chunk_size(name):
    plain = resolve(tree_with({}, name))
    for head in LATENT_HEADS:
        for chunk_size in CHUNK_SIZES:
            config = variant(f"head={head},k={chunk_size}", name)
            assert (config.lm.head.name, config.chunk_size) == (head, chunk_size)
            assert isinstance(config.lm.head, HEADS[head][1])
            assert config.lm.head.num_blocks == plain.lm.head.num_blocks
            assert config.autoencoder.model.latent_size == 32 * chunk_size
            for ours, before in ((config.autoencoder, plain.autoencoder), (config.lm, plain.lm)):
                lost = before.data.block_tokens - ours.data.block_tokens
                assert 0 <= lost < chunk_size and not ours.data.block_tokens % chunk_size
            assert config.stages == ("autoencoder", "lm") and config.has_autoencoder


@pytest.mark.parametrize("name", VARIABLE)
def test_the_softmax_head_makes_a_recipe_its_autoregressive_baseline(name):
    plain, config = resolve(tree_with({}, name)), variant("head=softmax", name)
    assert (config.chunk_size, config.lm.head.name) == (1, "softmax")
    assert config.stages == ("lm",) and not config.has_autoencoder
    assert config.lm.model == plain.lm.model and config.lm.data == plain.lm.data
    assert variant("head=softmax,k=1", name) == config


def test_longer_chunks_of_the_quickstart_have_a_wider_autoencoder():
    """With K > 2 the autoencoder is twice as wide, and a step of the language model has two blocks."""
    for arguments, rows, width, rate, steps in (
        ("", 1, 128, 4e-3, 1000),
        ("head=softmax", 1, 128, 4e-3, 1000),
        ("k=4", 2, 256, 3e-3, 1250),
        ("head=flow,k=8", 2, 256, 3e-3, 2500),
    ):
        config = resolve(tree_with({}, "quickstart", arguments))
        assert (config.tokenizer.vocab_size, config.lm.training.batch_size) == (4096, rows)
        stage = config.autoencoder
        assert stage.training.num_steps == steps
        assert (stage.model.hidden_size, stage.optimizer.learning_rate) == (width, rate)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "path, differing", [("", ["tokenizer.whitespace_pieces"]), ("m.model", [])]
)
def test_only_a_run_that_trained_its_tokenizer_keeps_how(path, differing, training):
    """Others ignore the key, and older ones, which lacked it, are continued by today's recipes."""
    changes = {"tokenizer.path": path, "tokenizer.whitespace_pieces": False}
    before = as_dict(resolve(tree_with(changes, "quickstart")))
    ours = as_dict(resolve(tree_with({"tokenizer.path": path}, "quickstart")))
    assert [key for key, *_ in differing_keys(ours, before, training)] == differing
    older = as_dict(resolve(tree_with({}, "calm_m")))
    del older["tokenizer"]["whitespace_pieces"]
    ours, older = as_dict(resolve(tree_with({}, "calm_m"))), as_dict(resolve(older))
    assert ours != older and not differing_keys(ours, older, training)


@pytest.mark.parametrize(
    "arguments, temperature, targets, prior",
    [
        ("", 0.5, None, 2),
        ("k=2", 0.5, None, 2),
        ("head=energy", 0.5, 16, 2),
        ("head=energy,k=1", 0.5, 16, 2),
        ("head=energy,k=4", 1, 0, 2),
        ("k=1", 0.5, None, 2),
        ("k=4", 1, None, 2),
        ("k=8", 1, None, 2),
        ("head=flow", 0.5, None, 2),
        ("head=diffusion,k=4", 1, None, 0),
        ("head=softmax", 0.5, None, 0),
    ],
)
def test_what_the_quickstart_changes_by_head_and_chunk_size(arguments, temperature, targets, prior):
    config = resolve(tree_with({}, "quickstart", arguments))
    assert (config.sample.temperature, config.sample.sampler) == (temperature, "pooled")
    assert getattr(config.lm.head, "num_target_samples", None) == targets
    assert config.lm.token_prior_weight == prior
    if "head=" not in arguments:
        assert config.lm.head.name == "flow"
    if config.lm.head.name == "flow":
        assert (config.lm.head.num_samples, config.lm.head.num_steps) == (4, 2)


def test_an_autoencoder_of_another_run_is_no_stage_to_train():
    """So its batch size does not limit the mesh."""
    for stage in ("all", "lm"):
        config = resolve(tree_with({"autoencoder.checkpoint": "runs/other", "stage": stage}))
        assert config.stages == ("lm",) and config.autoencoder_source == "runs/other"


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_recipes_have_no_autoencoder_stage(name):
    config = resolve(tree_with({}, name))
    assert (config.chunk_size, config.lm.head.name, config.stages) == (1, "softmax", ("lm",))


@pytest.mark.parametrize("name", BASELINES)
def test_baseline_recipes_have_as_many_tokens_per_step_as_calm(name):
    ours, calm = (resolve(tree_with({}, recipe)).lm for recipe in (name, "calm_m"))
    assert ours.data.block_tokens * ours.training.batch_size == (
        calm.data.block_tokens * calm.training.batch_size
    )
    assert ours.training.num_steps == calm.training.num_steps


def test_blocks_are_rounded_down_to_whole_chunks_with_a_message(capsys):
    config = variant("k=3")
    assert (config.autoencoder.data.block_tokens, config.lm.data.block_tokens) == (2046, 8190)
    assert capsys.readouterr().out.splitlines() == [
        "k=3: autoencoder.data.block_tokens=2048 becomes 2046",
        "k=3: lm.data.block_tokens=8192 becomes 8190",
    ]
    assert variant("k=8").lm.data.block_tokens == 8192
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", VARIABLE)
def test_the_order_of_recipe_arguments_does_not_matter(name):
    for one, other in (
        ("head=flow,k=8", "k=8,head=flow"),
        ("head=softmax,k=1", "k=1,head=softmax"),
    ):
        assert variant(one, name) == variant(other, name)


@pytest.mark.parametrize("name", VARIABLE)
def test_the_recipes_own_head_and_chunk_size_as_arguments_change_nothing(name):
    plain = resolve(tree_with({}, name))
    head = f"head={plain.lm.head.name}"
    assert variant(head, name) == plain
    if name == "bench_small":
        # Its latents have half of the paper's size, 32 K, which k=4 gives them.
        assert plain.autoencoder.model.latent_size == 64
        return
    own = f"k={plain.chunk_size}"
    for arguments in (own, f"{head},{own}"):
        assert variant(arguments, name) == plain


BAD_ARGUMENTS = {
    "head=nope": "head='nope' is none of energy, diffusion, flow, softmax",
    "k=0": "k='0' must be a number of tokens, at least 1",
    "k=x": "k='x' must be a number of tokens, at least 1",
    "k=-4": "k='-4' must be",
    "k=2.5": "k='2.5' must be",
    # The autoencoder's blocks of 2048 tokens cannot hold two chunks.
    "k=1025": "k=1025: a block of autoencoder.data.block_tokens=2048 must hold at least 2 chunks",
    "head=softmax,k=4": "k=4: head=softmax predicts single tokens",
    "k=4,head=softmax": "k=4: head=softmax predicts single tokens",
    "depth=3": "config argument 'depth=3': give head=NAME or k=TOKENS",
    "flow": "config argument 'flow': give head=NAME",
    "k=": "config argument 'k=': give",
    "k=4,k=8": "config argument 'k=8': give head=NAME or k=TOKENS, each at most once",
    "head=flow,k=4,head=flow": "config argument 'head=flow': give",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_a_bad_recipe_argument_is_refused_with_its_name_and_value(arguments):
    with pytest.raises(UserError) as caught:
        variant(arguments)
    assert str(caught.value).startswith(BAD_ARGUMENTS[arguments])
    assert "\n" not in str(caught.value)


def test_the_largest_chunk_that_fits_a_block_twice_is_accepted():
    assert variant("k=1024").chunk_size == 1024


# Recipe arguments, the keys to set, and what the message must contain.
BAD_VARIANTS = [
    ("head=softmax", {"chunk_size": 4}, "chunk_size=4: lm.head.name='softmax'"),
    ("head=softmax", {"stage": "autoencoder"}, "stage='autoencoder': lm.head.name='softmax'"),
    ("head=softmax", {"autoencoder.checkpoint": "runs/x"}, "autoencoder.checkpoint='runs/x': "),
    ("head=softmax", {"sample.temperature": -1.0}, "temperature=-1 "),
    ("head=softmax", {"sample.top_p": 0.0}, "top_p=0 "),
    ("head=softmax", {"lm.head.num_blocks": 4}, "no key lm.head.num_blocks"),
    ("head=diffusion", {"lm.head.num_steps": 1}, "lm.head.num_steps=1 "),
    ("head=diffusion", {"lm.head.num_steps": 1001}, "lm.head.num_steps=1001 "),
    ("head=diffusion", {"lm.head.num_blocks": 0}, "lm.head.num_blocks=0 "),
    ("head=diffusion", {"lm.head.num_samples": 0}, "lm.head.num_samples=0 "),
    ("head=diffusion", {"sample.top_p": 0.5}, "top_p=0.5 "),
    ("head=diffusion", {"sample.temperature": 0.0}, "temperature=0 "),
    ("head=flow", {"lm.head.solver": "rk4"}, "lm.head.solver='rk4' is none of midpoint, euler"),
    ("head=flow", {"lm.head.num_steps": 0}, "lm.head.num_steps=0 "),
    ("head=flow", {"lm.head.num_steps": 1001}, "lm.head.num_steps=1001 "),
    ("head=flow", {"lm.head.num_blocks": 0}, "lm.head.num_blocks=0 "),
    ("head=flow", {"lm.head.num_samples": 0}, "lm.head.num_samples=0 "),
    ("head=flow", {"sample.temperature": 2.0}, "temperature=2 "),
    ("head=flow", {"sample.temperature": 0.3, "sample.max_draws": 3}, "max_draws=3 "),
    (
        "head=diffusion",
        {"sample.temperature": 0.4, "sample.sampler": "published"},
        "temperature=0.4",
    ),
    ("k=2", {"lm.data.block_tokens": 33}, "lm.data.block_tokens=33 "),
]


@pytest.mark.parametrize(
    ("arguments", "changes", "expected"),
    BAD_VARIANTS,
    ids=[f"{arguments}-{next(iter(changes))}" for arguments, changes, _ in BAD_VARIANTS],
)
def test_values_that_a_head_does_not_support_are_refused(arguments, changes, expected):
    assert expected in refusal(tree_with(changes, "calm_m", arguments))


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
def test_the_softmax_head_supports_every_temperature_and_top_p(temperature):
    changes = {"sample.temperature": temperature, "sample.top_p": 0.9}
    sample = resolve(tree_with(changes, "calm_m", "head=softmax")).sample
    assert (sample.temperature, sample.top_p) == (temperature, 0.9)


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("diffusion", {"lm.head.num_steps": 2}),
        ("diffusion", {"lm.head.num_steps": 1000}),
        ("flow", {"lm.head.num_steps": 1, "lm.head.solver": "euler"}),
        ("flow", {"lm.head.num_steps": 1000}),
        ("energy", {"eval.context_tokens": 2044}),
    ],
)
def test_the_bounds_of_head_keys_are_accepted(head, changes):
    resolve(tree_with(changes, "calm_m", f"head={head}"))


def test_head_and_chunk_size_are_keys_that_a_workdir_fixes():
    plain = as_dict(resolve(tree_with({})))
    for arguments in ("head=diffusion", "head=flow", "head=softmax"):
        keys = [key for key, *_ in differing_keys(as_dict(variant(arguments)), plain, False)]
        assert "lm.head.name" in keys
    keys = [key for key, *_ in differing_keys(as_dict(variant("k=8")), plain, False)]
    assert keys == ["chunk_size", "autoencoder.model.latent_size"]


# --- Parameter counts

LLAMA = types.SimpleNamespace(vocab_size=128257, pad_id=128256)


def count_lm(config):
    return count(build.make_lm_task(config, LLAMA))


def linear(inputs, outputs):
    return inputs * outputs + outputs


def transformer(config):
    d, f = config.lm.model.hidden_size, config.lm.model.intermediate_size
    return config.lm.model.num_layers * (4 * d * d + 3 * d * f + 2 * d) + d


def chunk_embedding(config):
    d, k = config.lm.model.hidden_size, config.chunk_size
    return LLAMA.vocab_size * d + linear(k * d, 2 * d) + linear(2 * d, d) + 2 * d


def modulated_mlp(config, output):
    """The network of the diffusion and the flow head: 256 features of time, the condition, the blocks."""
    d, z = config.lm.model.hidden_size, config.autoencoder.model.latent_size
    block = linear(d, 3 * d) + 2 * d + 2 * linear(d, d)
    ends = linear(256, d) + 2 * linear(d, d) + linear(z, d) + linear(d, 2 * d) + linear(d, output)
    return ends + config.lm.head.num_blocks * block


def energy_head(config):
    d, z, e = (
        config.lm.model.hidden_size,
        config.autoencoder.model.latent_size,
        config.lm.head.noise_size,
    )
    block = 2 * d + linear(2 * d, d) + linear(d, d) + linear(d, 2 * d) + linear(d, d)
    ends = linear(e, d) + linear(d, d) + 3 * 2 * d + linear(d, d) + linear(d, z)
    return ends + config.lm.head.num_blocks * block


@pytest.mark.parametrize(
    ("name", "published"),
    # The paper says 849M for the last one, but its sizes make 847.0M.
    [("ar_s", "282.0M"), ("ar_m", "465M"), ("ar_l", "847.0M")],
)
def test_baselines_have_the_published_parameter_count(name, published):
    ours = count_lm(resolve(tree_with({}, name)))
    assert published in (f"{ours / 1e6:.1f}M", f"{ours / 1e6:.0f}M")


@pytest.mark.parametrize("name", BASELINES)
def test_the_parameters_of_a_baseline_are_a_transformer_and_two_embedding_tables(name):
    config = resolve(tree_with({}, name))
    tables = 2 * LLAMA.vocab_size * config.lm.model.hidden_size
    assert count_lm(config) == transformer(config) + tables


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIABLE)
@pytest.mark.parametrize(
    "arguments", ["head=diffusion", "head=flow", "head=softmax", "k=1", "head=flow,k=16"]
)
def test_the_parameter_count_of_a_variant_is_the_sum_of_its_parts(name, arguments):
    config = variant(arguments, name)
    latent, width = config.autoencoder.model.latent_size, config.lm.model.hidden_size
    parts = {
        "energy": lambda: chunk_embedding(config) + energy_head(config),
        "diffusion": lambda: chunk_embedding(config) + modulated_mlp(config, 2 * latent),
        "flow": lambda: chunk_embedding(config) + modulated_mlp(config, latent),
        "softmax": lambda: 2 * LLAMA.vocab_size * width,
    }
    expected = transformer(config) + parts[config.lm.head.name]()
    if config.lm.token_loss_weight:
        size = config.chunk_size * width
        # The network from the hidden state to K vectors, their LayerNorm, and the table of logits.
        expected += linear(width, 2 * width) + linear(2 * width, size) + 2 * width
        expected += LLAMA.vocab_size * width
    assert count_lm(config) == expected


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_the_chunk_size_changes_four_layers_of_the_autoencoder(chunk_size):
    """Those to and from the latent, and those between a chunk and its K tokens."""

    def of(k):
        d, z = 512, 32 * k
        return linear(k * d, d) + linear(d, k * d) + linear(d, 2 * z) + linear(z, d)

    ours, four = (
        count(build.make_autoencoder_task(variant(f"k={k}"), LLAMA)) for k in (chunk_size, 4)
    )
    assert ours - four == of(chunk_size) - of(4)


# --- Code that must not depend on the model


@pytest.mark.parametrize("module", [loop, evaluator])
def test_training_and_evaluation_depend_on_no_particular_model_head_or_task(module):
    """They import the `Task` interface only."""
    tree = ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8"))
    imported, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    own = {name for name in imported if name.startswith("calm_jax")}
    assert "calm_jax.tasks.Task" in own
    forbidden = (
        "calm_jax.models.heads",
        "calm_jax.models",
        "calm_jax.run.workdir",
        "calm_jax.run.recipe",
    )
    assert not {name for name in own if name.startswith(forbidden)}
    concrete = {"CalmTask", "AutoregressiveTask", "AutoencoderTask", "LmTask"}
    assert not {name.rpartition(".")[2] for name in own} & concrete
    assert not names & (concrete | {*HEADS, "autoencoder", "lm"})


# --- Stored configs


@pytest.mark.parametrize("name", RECIPES)
def test_a_stored_config_resolves_to_the_same_config(name, tmp_path):
    config = resolve(tree_with({"seed": 7}, name))
    (tmp_path / "config.json").write_text(as_json(config), encoding="utf-8")
    tree = stored.get_config(str(tmp_path))
    assert resolve(tree) == config
    tree.sample.prompts = ("one", "two", "three")  # as a flag on the command line would
    tree.sample.stop = ("\n\n",)
    sample = resolve(tree).sample
    assert (sample.prompts, sample.stop) == (("one", "two", "three"), ("\n\n",))


@pytest.mark.parametrize("content", [None, "{", ""])
def test_the_error_for_a_folder_that_is_no_workdir_names_it(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="is no workdir") as caught:
        stored.get_config(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_the_error_for_a_missing_folder_says_how_to_give_one():
    with pytest.raises(UserError, match=r"configs/workdir\.py:DIR"):
        stored.get_config()


def differing(changes, training):
    ours = as_dict(resolve(tree_with(changes)))
    before = json.loads(as_json(resolve(tree_with({}))))
    return differing_keys(ours, before, training)


def test_equal_configs_do_not_differ():
    assert differing({}, training=True) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lm.head.beta", 1.5),
        ("lm.model.num_layers", 8),
        ("autoencoder.model.dropout", 0.1),
        ("tokenizer.vocab_size", 513),
        ("chunk_size", 8),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_keys_of_the_model_are_fixed_for_every_command(key, value, training):
    old = as_dict(resolve(tree_with({})))
    for part in key.split("."):
        old = old[part]
    assert differing({key: value}, training) == [(key, value, old)]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 1),
        ("compute_dtype", "float32"),
        ("data.train_files", "x.txt"),
        ("lm.data.append_eos", True),
        ("autoencoder.data.block_tokens", 1024),
        ("lm.training.batch_size", 128),
    ],
)
def test_keys_that_would_silently_change_a_resumed_run_are_fixed_for_training_only(key, value):
    assert [found for found, *_ in differing({key: value}, training=True)] == [key]
    assert differing({key: value}, training=False) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lm.model.remat", "full"),
        ("lm.model.attention", "splash"),
        ("tokenizer.path", "elsewhere.model"),
        ("data.on_bad_record", "skip"),
        ("data.read_threads", 2),
        ("lm.training.num_steps", 5),
        ("lm.training.accumulation_steps", 2),
        ("eval.num_samples", 4),
        ("sample.temperature", 0.25),
        ("sample.sampler", "batch"),
        ("sample.stop", ("x",)),
        ("mesh.fsdp", 2),
    ],
)
def test_keys_that_a_resumed_run_may_change(key, value):
    assert differing({key: value}, training=True) == []


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("flow", {"lm.head.num_steps": 4, "lm.head.solver": "euler"}),
        ("diffusion", {"lm.head.num_steps": 50}),
    ],
)
def test_the_sampling_keys_of_a_head_are_not_fixed(head, changes):
    """They do not change what the parameters mean."""
    ours, before = (
        resolve(tree_with(changed, "calm_m", f"head={head}")) for changed in (changes, {})
    )
    stored = json.loads(as_json(before))
    assert differing_keys(as_dict(ours), stored, training=False) == []


@pytest.mark.parametrize("training", [True, False])
def test_the_token_priors_weight_is_not_fixed(training):
    """The prior takes no part in training."""
    ours, before = (
        resolve(tree_with({"lm.token_prior_weight": weight}, "quickstart")) for weight in (1.0, 3.0)
    )
    assert differing_keys(as_dict(ours), json.loads(as_json(before)), training) == []


def test_a_key_that_only_one_of_two_configs_has_differs():
    ours, before = as_dict(resolve(tree_with({}))), as_dict(resolve(tree_with({})))
    del before["lm"]["head"]["beta"]
    assert differing_keys(ours, before, training=False) == [("lm.head.beta", 1.0, "(no such key)")]
    assert differing_keys(before, ours, training=False) == [("lm.head.beta", "(no such key)", 1.0)]


def test_a_config_is_frozen():
    config = resolve(tree_with({}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lm.head.beta = 1.5
