"""Every recipe resolves; every bad value is one line that names its key."""

import dataclasses
import importlib
import json
import logging
import pathlib

import pytest

import configs
from calm_jax.config import Config, as_dict, as_json, differing_keys, resolve
from calm_jax.errors import UserError
from calm_jax.heads import HEADS
from configs import common
from configs import workdir as stored

RECIPES = sorted(
    path.stem
    for path in pathlib.Path(configs.__file__).parent.glob("*.py")
    if path.stem not in ("__init__", "workdir")
)


def tree_with(changes, name="common"):
    """A recipe as a plain nested dict, some of its keys set (or new) without a look at their types."""
    tree = importlib.import_module(f"configs.{name}").get_config().to_dict()
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


def keys_of(tree, path=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def refusal(tree):
    with pytest.raises(UserError) as caught:
        resolve(tree)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_resolves_to_its_own_values(name):
    tree = tree_with({}, name)
    config = resolve(tree)
    assert isinstance(config, Config)
    assert as_dict(config) == tree
    # A recipe changes values of `common` and adds nothing, except the keys of another kind of head.
    head = {key for key in keys_of(tree) if key.startswith("lm.head.")}
    assert set(keys_of(tree)) - head <= set(keys_of(common.get_config().to_dict()))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "common"])
def test_recipe_says_the_command_that_runs_it(name):
    assert f"--config=configs/{name}.py" in importlib.import_module(f"configs.{name}").__doc__


def test_paper_recipe_without_a_tokenizer_says_what_it_needs():
    message = refusal(common.get_config())
    assert message.startswith("tokenizer.path is empty") and "tokenizer.model" in message


# Key as the message spells it, and the values that cause it; the first is the one that the message shows.
BAD = [
    ("stage", {"stage": "both"}),
    ("compute_dtype", {"compute_dtype": "float16"}),
    ("chunk_size", {"chunk_size": 0}),
    # Sizes that do not fit.
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
    ("lm.head.num_target_samples", {"lm.head.num_target_samples": 0}),
    ("lm.head.num_blocks", {"lm.head.num_blocks": 0}),
    ("lm.head.noise_size", {"lm.head.noise_size": 0}),
    ("lm.head.beta", {"lm.head.beta": 0.0}),
    ("lm.head.beta", {"lm.head.beta": -0.5}),
    ("lm.head.beta", {"lm.head.beta": 2.01}),
    ("lm.head.beta", {"lm.head.beta": float("nan")}),
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
    ("temperature", {"sample.temperature": 0.0}),
    ("temperature", {"sample.temperature": -1.0}),
    ("temperature", {"sample.temperature": 1.25}),
    ("num_candidates", {"sample.num_candidates": 0}),
    ("max_tokens", {"sample.max_tokens": 0}),
    ("prompt_alignment", {"sample.prompt_alignment": "right"}),
    ("checkpoint.keep", {"checkpoint.keep": 0}),
    ("data", {"mesh.data": 0}),
    ("tensor", {"mesh.tensor": -1, "mesh.data": -1}),
    # Wrong types.
    ("seed", {"seed": 0.5}),
    ("seed", {"seed": True}),
    ("stage", {"stage": 3}),
    ("chunk_size", {"chunk_size": "4"}),
    ("lm.model.remat", {"lm.model.remat": 1}),
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
    # Numbers that would train to NaN, or away from the goal.
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": float("nan")}),
    ("lm.optimizer.learning_rate", {"lm.optimizer.learning_rate": float("inf")}),
    ("lm.optimizer.beta1", {"lm.optimizer.beta1": 1.5}),
    ("lm.optimizer.beta2", {"lm.optimizer.beta2": 1.0}),
    ("lm.optimizer.weight_decay", {"lm.optimizer.weight_decay": -1.0}),
    ("lm.optimizer.epsilon", {"lm.optimizer.epsilon": 0.0}),
    ("lm.optimizer.final_learning_rate", {"lm.optimizer.final_learning_rate": -1.0}),
    ("lm.model.rope_theta", {"lm.model.rope_theta": 0.0}),
    ("lm.model.norm_epsilon", {"lm.model.norm_epsilon": -1.0}),
    ("autoencoder.model.kl_weight", {"autoencoder.model.kl_weight": -1.0}),
    ("autoencoder.min_accuracy", {"autoencoder.min_accuracy": 2.0}),
]


@pytest.mark.parametrize(
    ("key", "changes"), BAD, ids=[f"{next(iter(c))}={next(iter(c.values()))!r}" for _, c in BAD]
)
def test_bad_value_is_refused_by_key_and_value(key, changes):
    value = next(iter(changes.values()))
    message = refusal(tree_with(changes))
    shown = f"{value:g}" if key == "temperature" else repr(value)
    assert f"{key}={shown}" in message


def test_whole_numbers_are_taken_for_floats():
    config = resolve(tree_with({"lm.head.beta": 1, "lm.optimizer.learning_rate": 1}))
    assert type(config.lm.head.beta) is float and type(config.lm.optimizer.learning_rate) is float


def test_bounds_belong_to_their_range():
    changes = {
        "lm.head.beta": 2.0,
        "lm.head.num_samples": 2,
        "lm.head.num_target_samples": 1,
        "lm.model.num_kv_heads": 1,
        "lm.data.block_tokens": 8,
        "sample.temperature": 1.0,
        "lm.optimizer.warmup_steps": 0,
        "autoencoder.model.dropout": 0.0,
    }
    config = resolve(tree_with(changes))
    assert config.lm.head.beta == 2 and config.sample.temperature == 1


def test_beta_two_warns_and_less_does_not(caplog):
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
def test_unknown_key_is_told_the_nearest_one(key, meant):
    assert f"no key {key}: did you mean {meant!r}?" in refusal(tree_with({key: 1}))


def test_unknown_key_near_nothing_is_told_them_all():
    message = refusal(tree_with({"mesh.xyz": 1}))
    assert "no key mesh.xyz:" in message and "data, fsdp, tensor" in message


@pytest.mark.parametrize("key", ["seed", "lm", "lm.head.beta", "autoencoder.training.num_steps"])
def test_missing_key_is_named(key):
    tree = tree_with({})
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node[section]
    del node[last]
    assert refusal(tree).endswith(f"lacks the key {key}")


def test_unknown_head_is_told_the_known_ones():
    message = refusal(tree_with({"lm.head.name": "zzz"}))
    assert message.startswith("lm.head.name='zzz'")
    assert all(name in message for name in HEADS)
    assert "did you mean 'energy'?" in refusal(tree_with({"lm.head.name": "enregy"}))


def test_head_without_a_name_is_refused():
    tree = tree_with({})
    del tree["lm"]["head"]["name"]
    assert refusal(tree).endswith("lacks the key lm.head.name")


def test_validation_files_need_training_files():
    assert "data.validation_files" in refusal(tree_with({"data.validation_files": "x.txt"}))


# --- Stored configs


@pytest.mark.parametrize("name", RECIPES)
def test_stored_config_is_the_same_recipe(name, tmp_path):
    config = resolve(tree_with({"seed": 7}, name))
    (tmp_path / "config.json").write_text(as_json(config), encoding="utf-8")
    tree = stored.get_config(str(tmp_path))
    assert resolve(tree) == config
    tree.sample.prompts = ("one", "two", "three")  # can be overridden on the command line
    assert resolve(tree).sample.prompts == ("one", "two", "three")


@pytest.mark.parametrize("content", [None, "{", ""])
def test_folder_that_is_no_workdir_is_named(content, tmp_path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match="is no workdir") as caught:
        stored.get_config(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_workdir_config_without_a_folder_says_how_to_give_one():
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
def test_no_command_reads_parameters_under_another_model(key, value, training):
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
def test_only_training_minds_what_a_resumed_run_would_silently_change(key, value):
    assert [found for found, *_ in differing({key: value}, training=True)] == [key]
    assert differing({key: value}, training=False) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lm.model.remat", True),
        ("tokenizer.path", "elsewhere.model"),
        ("data.on_bad_record", "skip"),
        ("lm.training.num_steps", 5),
        ("lm.training.accumulation_steps", 2),
        ("eval.num_samples", 4),
        ("sample.temperature", 0.25),
        ("mesh.fsdp", 2),
    ],
)
def test_what_a_run_may_change_does_not_differ(key, value):
    assert differing({key: value}, training=True) == []


def test_a_key_that_the_stored_config_lacks_differs():
    ours, before = as_dict(resolve(tree_with({}))), as_dict(resolve(tree_with({})))
    del before["lm"]["head"]["beta"]
    assert differing_keys(ours, before, training=False) == [("lm.head.beta", 1.0, "(no such key)")]
    assert differing_keys(before, ours, training=False) == [("lm.head.beta", "(no such key)", 1.0)]


def test_config_is_frozen():
    config = resolve(tree_with({}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lm.head.beta = 1.5
