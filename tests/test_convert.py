"""Published checkpoints in and out again: the same bits, the same outputs, and what does not fit is refused."""

import dataclasses
import errno
import importlib
import io
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time

import flax.traverse_util
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
import sentencepiece
from absl import flags

from calm_jax.atomic import refuse_existing
from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import Interrupted, UserError
from calm_jax.interop import names, published
from calm_jax.interop.plan import make_plan
from calm_jax.interop.source import find_tokenizer, folder_of
from calm_jax.interop.weights import Weights
from calm_jax.mesh import MeshConfig, make_mesh
from calm_jax.workdir import Workdir, make_autoencoder_task, make_lm_task
from configs import ar_m, common
from tests import tiny_recipe
from tests.test_recipe import ROOT, run, start, text_glob  # noqa: F401 (a fixture)
from tests.test_weights import state_dict, write_bin, write_index, write_safetensors
from tests.tiny_model import random_params


def command_module(name):
    """The module of a command, without its flags: other commands in this process have the same names for theirs."""
    taken = {flag: flags.FLAGS[flag] for flag in ("config", "workdir") if flag in flags.FLAGS}
    for flag in taken:
        delattr(flags.FLAGS, flag)
    before = set(flags.FLAGS)
    module = importlib.import_module(name)
    for flag in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, flag)
    for flag, value in taken.items():
        flags.FLAGS[flag] = value
    return module


convert = command_module("calm_jax.interop.convert")
export = command_module("calm_jax.interop.export")

SAFE, BIN = "model.safetensors", "pytorch_model.bin"
AUTOENCODERS = ["ae_k1", "ae_k2", "ae_k4", "ae_k8"]
CHECKPOINTS = [*AUTOENCODERS, "energy_k2", "energy_k4", "diffusion", "flow", "ar"]
# Those whose tests are enough when there is little time.
FAST = {"ae_k4", "energy_k2", "ar", "head=softmax"}


def each(cases):
    """The cases as parameters, all but a few of them slow."""
    return [pytest.param(x, marks=[] if x in FAST else pytest.mark.slow) for x in cases]


SPECIAL = {"bos_id": 94, "eos_id": 95, "pad_id": 96}


def sentencepiece_model(**ids):
    text = (
        "the cat sat on the mat and ran after a small dog 0123456789 (x) = [y]; def foo: return bar"
    )
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 50),
        model_writer=written,
        model_type="bpe",
        vocab_size=97,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        character_coverage=1.0,
        unk_id=0,
        minloglevel=2,
        **ids,
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """With the ids of the golden checkpoints."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(sentencepiece_model(**SPECIAL))
    return path


@pytest.fixture
def plan_of(tokenizer_file):
    """A plan, as the command makes it."""

    def plan(source, autoencoder=None, tokenizer=tokenizer_file, **overrides):
        found, tokenizer_config = find_tokenizer(str(tokenizer), source)
        recipes = {True: common.get_config(), False: ar_m.get_config()}
        keys = {key.replace("__", "."): value for key, value in overrides.items()}
        return make_plan(source, autoencoder, found, tokenizer_config, recipes, keys)

    return plan


@pytest.fixture
def converted(plan_of, tmp_path):
    """The workdir of a checkpoint."""

    def make(source, *arguments, name="converted", **options):
        convert.convert(plan_of(source, *arguments, **options), tmp_path / name)
        return Workdir(tmp_path / name)

    return make


def one_device():
    return make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])


def tasks(workdir):
    """The task of each stage that the workdir holds."""
    made = {}
    config, tokenizer = workdir.config, workdir.tokenizer
    if config.has_autoencoder:
        made["autoencoder"] = make_autoencoder_task(config, tokenizer)
    if workdir.checkpoints("lm").exists():
        made["lm"] = make_lm_task(config, tokenizer, config.eval.published)
    return made


def params(workdir):
    """Every parameter by stage and name."""
    flat = {}
    for stage, task in tasks(workdir).items():
        tree = workdir.load_params(stage, task, one_device())
        for name, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
            flat[f"{stage}/{name}"] = np.asarray(value)
    return flat


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype and array.shape == theirs[name].shape, name
        assert array.tobytes() == theirs[name].tobytes(), name


def tensors_of(folder):
    return safetensors.numpy.load_file(folder / SAFE)


def changed(source, target, config=None, tensors=None):
    """A copy of a checkpoint; `config` over its config.json (... takes a key out), `tensors` changes its dict."""
    shutil.copytree(source, target)
    path = target / "config.json"
    values = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))
    if tensors is not None:
        (target / BIN).unlink(missing_ok=True)
        weights = tensors_of(target)
        tensors(weights)
        write_safetensors(target / SAFE, weights)
    return target


def drop(*beginnings):
    def change(tensors):
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return change


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refusal(function, *arguments, **options):
    began = time.monotonic()
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert time.monotonic() - began < 10
    line = str(error.value)
    assert "\n" not in line and len(line) < 1000, line[:2000]
    return line


# --- Every kind, in and out


def own_params(folder):
    """The parameters of a golden checkpoint, read without a conversion."""
    config, weights = published.PublishedConfig(folder), Weights(folder)
    kind = config.architecture
    if kind == published.AUTOENCODER:
        return {"autoencoder": (names.autoencoder_rows(config.autoencoder()), weights)}
    body = config.transformer()
    if kind == published.AUTOREGRESSIVE:
        return {"lm": (names.autoregressive_rows(body, tied=False), weights)}
    inside = published.PublishedConfig(folder.parent / config["ae_path"]).autoencoder()
    return {
        "autoencoder": (names.prefixed(names.autoencoder_rows(inside), "ae_model."), weights),
        "lm": (names.calm_rows(body, config.head()), weights),
    }


@pytest.mark.parametrize("name", each(CHECKPOINTS))
def test_a_checkpoint_comes_in_and_goes_out_bit_for_bit(name, golden, converted, tmp_path):
    workdir = converted(golden / name)
    assert workdir.is_converted
    found = params(workdir)
    like = {stage: jax.eval_shape(t.init, jax.random.key(0)) for stage, t in tasks(workdir).items()}
    expected = {}
    for stage, (rows, weights) in own_params(golden / name).items():
        tree = names.read_parameters(rows, weights, like[stage])
        for path, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
            expected[f"{stage}/{path}"] = value
    assert_same(found, expected)

    out = tmp_path / "out"
    count = export.export(workdir, out, "autoencoder")
    written, before = tensors_of(out), tensors_of(golden / name)
    recorded = json.loads((golden / "state_dict_names.json").read_text())[name]
    assert set(written) == set(recorded) | {n for n in recorded if "lm_head_weight" in n}
    if name == "ae_k1":
        before["decoder.lm_head_weight"] = before["encoder.embed_tokens.weight"]
    assert_same(written, before)
    assert count == sum(value.size for value in found.values())

    # The sizes that make the model, and the kind, are as they were.
    ours, theirs = (json.loads((x / "config.json").read_text()) for x in (out, golden / name))
    free = {"ae_path", "max_position_embeddings"}
    for key in (ours.keys() & theirs.keys()) - free:
        assert ours[key] == theirs[key], key
    assert theirs.keys() <= ours.keys() | {"model_type"}
    if name != "ar":
        assert "model_type" not in ours

    # Its tokenizer lies beside it.
    again = converted(out, name="again", tokenizer="")
    assert_same(params(again), found)
    for section in ("chunk_size", "autoencoder", "lm"):
        assert getattr(again.config, section) == getattr(workdir.config, section)
    assert again.tokenizer.fingerprint == workdir.tokenizer.fingerprint


def made_here(folder, arguments, **changes):
    """A workdir of this project's own, with random parameters."""
    tree = tiny_recipe.get_config(f"nowhere/*.txt,{arguments}")
    if tree.lm.head.name == "diffusion":
        tree.lm.head.num_steps = 100
    tree.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    config, tokenizer, workdir = resolve(tree), ByteTokenizer(b""), Workdir(folder)
    made = {"lm": make_lm_task(config, tokenizer, config.eval.published)}
    if config.has_autoencoder:
        made["autoencoder"] = make_autoencoder_task(config, tokenizer)
    with ocp.StandardCheckpointer() as checkpointer:
        for seed, (stage, task) in enumerate(made.items()):
            path = workdir.checkpoints(stage).resolve() / "7" / "params"
            params = random_params(task, seed)
            if stage == "lm" and config.has_autoencoder:
                embedding = params["embed"]["tokens"]["embedding"]
                # As it is in every model: it begins as zero and gets no gradient.
                params["embed"]["tokens"]["embedding"] = np.where(
                    np.arange(len(embedding))[:, None] == tokenizer.pad_id, 0, embedding
                ).astype(np.float32)
            checkpointer.save(path, params)
    workdir.create_converted(config, tokenizer, {})
    return workdir


VARIANTS = {
    "head=energy,k=1": {},
    "head=energy,k=4": {"lm__model__num_kv_heads": 1},
    "head=energy,k=3": {"lm__head__beta": 1.5, "lm__head__num_blocks": 3},
    "head=diffusion,k=2": {"autoencoder__model__num_encoder_layers": 4},
    "head=flow,k=8": {"lm__model__num_heads": 4, "lm__model__num_layers": 3},
    "head=softmax": {"lm__model__num_kv_heads": 1, "lm__model__norm_epsilon": 1e-5},
}


@pytest.mark.parametrize("arguments", each(VARIANTS))
def test_a_model_of_ours_goes_out_and_comes_in_bit_for_bit(arguments, converted, tmp_path):
    workdir = made_here(tmp_path / "ours", arguments, **VARIANTS[arguments])
    ours, config = params(workdir), workdir.config
    export.export(workdir, tmp_path / "out", "autoencoder")
    again = converted(tmp_path / "out", tokenizer="bytes")
    assert_same(params(again), ours)
    assert again.config.chunk_size == config.chunk_size
    assert again.config.lm.model == config.lm.model
    if not config.has_autoencoder:
        assert again.config.lm.head == config.lm.head
        return
    # How many targets the energy score has is not in the published config.json.
    head = again.config.lm.head
    if config.lm.head.name == "energy":
        assert "num_target_samples=4" in published.not_carried_over(config)[0]
        head = dataclasses.replace(head, num_target_samples=4)
    assert head == config.lm.head
    own = tmp_path / "out" / "autoencoder"
    alone = converted(own, name="alone", tokenizer="bytes")
    assert alone.config.autoencoder.model == config.autoencoder.model
    assert_same(
        params(alone), {name: ours[name] for name in ours if name.startswith("autoencoder/")}
    )
    both = converted(tmp_path / "out", own, name="both", tokenizer="bytes")
    assert both.config.autoencoder.model == config.autoencoder.model
    assert_same(params(both), ours)


# --- The same outputs


def assert_near(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.size == theirs.size
    error = np.abs(ours.reshape(theirs.shape) - theirs).max()
    assert error <= 1e-4 * np.abs(theirs).max()


@pytest.fixture
def loaded(golden, converted):
    """`(tasks, parameters of each, recorded arrays)` of a converted golden checkpoint."""

    def load(name, recorded):
        with np.load(golden / f"{recorded}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        workdir = converted(golden / name, compute_dtype="float32")
        made = tasks(workdir)
        return made, {s: workdir.load_params(s, t, one_device()) for s, t in made.items()}, arrays

    with jax.default_matmul_precision("highest"):
        yield load


@pytest.mark.parametrize("name", each(AUTOENCODERS))
def test_a_converted_autoencoder_computes_the_recorded_numbers(name, loaded):
    made, trees, golden = loaded(name, name)
    model, variables = made["autoencoder"].model, {"params": trees["autoencoder"]}
    tokens_PK = jnp.asarray(golden["input_ids"].reshape(-1, model.chunk_size))
    posterior = model.apply(variables, tokens_PK, method="encode")
    assert_near(posterior.mean, golden["enc_mean"])
    assert_near(posterior.log_std, golden["enc_log_std"])
    latents = golden["dec_latents"].reshape(len(tokens_PK), -1)
    assert_near(model.apply(variables, latents, method="decode"), golden["dec_logits"])


@pytest.mark.parametrize("name", each(["energy_k2", "energy_k4"]))
def test_a_converted_energy_model_computes_the_recorded_numbers(name, loaded):
    made, trees, golden = loaded(name, name)
    task, ids = made["lm"], golden["input_ids"]
    tokens_BLK = jnp.asarray(ids.reshape(len(ids), -1, task.chunk_size))
    h_BLD = task.hidden(trees["lm"], tokens_BLK)
    assert_near(h_BLD, golden["hidden_states"])
    frozen = {"params": trees["autoencoder"]}
    posterior = task.posterior(frozen, tokens_BLK[:, 1:].reshape(-1, task.chunk_size))
    assert_near(posterior.mean, golden["ae_mean"])
    noise_PNE = jnp.asarray(golden["head_rand"].swapaxes(0, 1) - 0.5)
    h_PD = h_BLD.reshape(-1, h_BLD.shape[-1])
    x_PNZ = task.model.head.apply({"params": trees["lm"]["head"]}, h_PD, noise_PNE)
    assert_near(x_PNZ.swapaxes(0, 1), golden["head_out"])


@pytest.mark.parametrize(
    ("name", "time", "method"), [("diffusion", "t", "predict"), ("flow", "t_index", "velocity")]
)
def test_a_converted_head_computes_the_recorded_numbers(name, time, method, loaded):
    made, trees, golden = loaded(name, f"{name}_head")
    variables = {"params": trees["lm"]["head"]}
    arguments = (jnp.asarray(golden[key]) for key in ("x_t", time))
    state, index = (x[:, None] for x in arguments)
    output = made["lm"].model.head.apply(variables, state, index, golden["z"], method=method)
    assert_near(output, golden["net_out"])


def test_a_converted_llama_computes_the_recorded_numbers(loaded):
    made, trees, golden = loaded("ar", "ar")
    model, ids = made["lm"].model, jnp.asarray(golden["input_ids"])[..., None]
    log_probs = model.apply({"params": trees["lm"]}, ids)
    assert_near(log_probs, jax.nn.log_softmax(golden["logits"]))


# --- Formats


def test_shards_of_half_floats_become_the_same_parameters(golden, converted, tmp_path):
    halved = {
        name: tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in tensors_of(golden / "ar").items()
    }
    folder = tmp_path / "shards"
    folder.mkdir()
    shutil.copy(golden / "ar" / "config.json", folder)
    order = list(halved)
    parts = [{name: halved[name] for name in order[i::3]} for i in range(3)]
    write_index(folder, SAFE, parts, write_safetensors)
    other = tmp_path / "bin"
    other.mkdir()
    shutil.copy(golden / "ar" / "config.json", other)
    write_bin(other / BIN, state_dict(halved))
    workdir, same = converted(folder), converted(other, name="same")
    assert_same(params(workdir), params(same))
    kernel = params(workdir)["lm/head/kernel"]
    assert kernel.dtype == np.float32
    np.testing.assert_array_equal(kernel, halved["lm_head.weight"].T.astype(np.float32))


def test_the_pickled_file_becomes_the_same_parameters(golden, converted, tmp_path):
    folder = changed(golden / "ae_k4", tmp_path / "pickled")
    (folder / SAFE).unlink()
    assert_same(params(converted(folder)), params(converted(golden / "ae_k4", name="other")))


# --- What is there twice, or once


TIED = {"tie_word_embeddings": True}


@pytest.mark.parametrize("has_output", [True, False])
def test_a_tied_llama_has_its_embedding_as_its_output(has_output, golden, converted, tmp_path):
    def tie(tensors):
        del tensors["lm_head.weight"]
        if has_output:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    source = changed(golden / "ar", tmp_path / "tied", TIED, tie)
    found = params(converted(source))
    embedding = tensors_of(source)["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found["lm/embed/embedding"], embedding)
    np.testing.assert_array_equal(found["lm/head/kernel"], embedding.T)


def test_a_tied_llama_with_another_output_is_refused(golden, converted, tmp_path):
    source = changed(golden / "ar", tmp_path / "tied", TIED)
    line = refusal(converted, source)
    assert "lm_head.weight" in line and "model.embed_tokens.weight" in line


def test_an_untied_llama_needs_its_output(golden, plan_of, tmp_path):
    source = changed(golden / "ar", tmp_path / "untied", {}, drop("lm_head"))
    assert "no tensor lm_head.weight" in refusal(plan_of, source)


@pytest.mark.parametrize(
    "dropped", ["generative_head.", pytest.param("mlp_generator.", marks=pytest.mark.slow)]
)
def test_either_name_of_the_head_is_enough(dropped, golden, converted, tmp_path):
    source = changed(golden / "energy_k4", tmp_path / "half", {}, drop(dropped))
    assert_same(params(converted(source)), params(converted(golden / "energy_k4", name="other")))


@pytest.mark.parametrize("dropped", ["decoder.lm_head_weight", "encoder.embed_tokens.weight"])
def test_either_name_of_the_embedding_is_enough(dropped, golden, converted, tmp_path):
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
def test_two_that_should_be_equal_and_are_not_are_refused(
    checkpoint, name, golden, converted, tmp_path
):
    def change(tensors):
        tensors[name].flat[0] += 1e-6

    source = changed(golden / checkpoint, tmp_path / "source", {}, change)
    before = listing(tmp_path)
    assert name in refusal(converted, source) or names.twin(name) in refusal(converted, source)
    assert listing(tmp_path) == before


def test_two_that_differ_in_the_sign_of_zero_are_not_bitwise_equal(golden, converted, tmp_path):
    def change(tensors):
        tensors["encoder.embed_tokens.weight"].flat[0] = 0.0
        tensors["decoder.lm_head_weight"].flat[0] = -0.0

    source = changed(golden / "ae_k4", tmp_path / "source", {}, change)
    assert "decoder.lm_head_weight" in refusal(converted, source)


def test_tensors_that_nothing_uses_are_named(golden, plan_of, tmp_path, capsys):
    def change(tensors):
        tensors["ema.step"] = np.zeros(2, np.int64)
        tensors["transformer.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    plan = plan_of(changed(golden / "energy_k4", tmp_path / "source", {}, change))
    extra = ["ema.step", "transformer.layers.0.self_attn.rotary_emb.inv_freq"]
    assert sorted(plan.left_over) == extra
    convert._print_notes(plan)
    shown = capsys.readouterr().out
    assert all(f"left over, not used: {name!r}" in shown for name in extra)
    for name in CHECKPOINTS:
        assert plan_of(golden / name).left_over == []


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
def test_a_tensor_that_is_missing_or_of_another_shape_or_type_is_named(
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


# --- The autoencoder of a language model


INSIDE = drop("ae_model.")


@pytest.mark.slow
def test_the_autoencoder_may_come_by_itself(golden, converted, tmp_path):
    expected = params(converted(golden / "energy_k4"))
    assert_same(params(converted(golden / "energy_k4", golden / "ae_k4", name="both")), expected)
    alone = changed(golden / "energy_k4", tmp_path / "alone", {}, INSIDE)
    workdir = converted(alone, golden / "ae_k4", name="apart")
    assert_same(params(workdir), expected)


def test_what_only_an_autoencoders_own_config_tells_is_read_from_it(golden, plan_of, tmp_path):
    own = changed(golden / "ae_k4", tmp_path / "own", {"ae_dropout": 0.25, "kl_weight": 0.5})
    plan = plan_of(golden / "energy_k4", own)
    model = plan.config.autoencoder.model
    assert (model.dropout, model.kl_weight) == (0.25, 0.5)
    assert not plan.notes and "--autoencoder" in plan_of(golden / "energy_k4").notes[0]


def test_an_autoencoder_that_is_not_the_one_inside_is_refused(golden, converted, tmp_path):
    name = "decoder.expand_layer.bias"

    def change(tensors):
        tensors[name][5] += 1e-6

    other = changed(golden / "ae_k4", tmp_path / "other", {}, change)
    line = refusal(converted, golden / "energy_k4", other)
    assert name in line and str(other) in line
    assert not (tmp_path / "converted").exists()


def test_no_autoencoder_is_refused_by_the_name_of_its_own(golden, plan_of, tmp_path):
    alone = changed(golden / "energy_k4", tmp_path / "alone", {"ae_path": "where/ae_is"}, INSIDE)
    line = refusal(plan_of, alone)
    assert "--autoencoder" in line and "where/ae_is" in line


def test_half_an_autoencoder_is_refused(golden, plan_of, tmp_path):
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
def test_an_autoencoder_that_does_not_fit_is_refused(
    autoencoder, config, key, keeps_inside, golden, plan_of, tmp_path
):
    other = changed(golden / autoencoder, tmp_path / "other", config)
    tensors = None if keeps_inside else INSIDE
    source = changed(golden / "energy_k4", tmp_path / "source", {}, tensors)
    assert key in refusal(plan_of, source, other)


@pytest.mark.parametrize("name", ["ae_k4", "ar"])
def test_what_has_no_autoencoder_takes_none(name, golden, plan_of):
    assert "--autoencoder" in refusal(plan_of, golden / name, golden / "ae_k4")


# --- config.json


# (checkpoint, keys, words of the refusal)
REFUSED = [
    ("energy_k4", {"rope_scaling": {"factor": 8.0}}, "rope_scaling"),
    ("energy_k4", {"attention_bias": True}, "attention_bias"),
    ("energy_k4", {"mlp_bias": True}, "mlp_bias"),
    ("energy_k4", {"hidden_act": "gelu"}, "hidden_act"),
    ("energy_k4", {"hidden_act": None}, "hidden_act"),
    ("energy_k4", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("energy_k4", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
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
    ("ar", {"rms_norm_eps": 0}, "norm_epsilon"),
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
def test_a_config_that_is_not_computed_is_refused_by_name(
    checkpoint, keys, words, golden, plan_of, tmp_path
):
    source = changed(golden / checkpoint, tmp_path / "source", keys)
    assert words in refusal(plan_of, source)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "[" * 10**5, '{"architectures": ' + "9" * 9999 + "}"]
)
def test_a_config_that_is_no_object_is_refused(text, golden, plan_of, tmp_path):
    source = changed(golden / "ar", tmp_path / "source")
    (source / "config.json").write_text(text)
    assert "config.json" in refusal(plan_of, source)
    (source / "config.json").unlink()
    assert "config.json" in refusal(plan_of, source)


def test_what_means_the_same_is_taken(golden, plan_of, tmp_path):
    """Keys as other versions of transformers write them."""
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
    assert plan_of(source).config.lm.model.norm_epsilon == 1e-5


def test_the_checkpoint_decides_what_the_model_is(golden, plan_of):
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


def test_other_keys_are_the_users(golden, plan_of):
    free = {"lm__model__remat": "full", "lm__model__attention": "xla"}
    plan = plan_of(golden / "energy_k4", seed=5, compute_dtype="float32", **free)
    assert (plan.config.seed, plan.config.compute_dtype) == (5, "float32")
    model = plan.config.lm.model
    assert (model.remat, model.attention) == ("full", "xla")


# --- Tokenizers


def test_a_tokenizer_that_does_not_fit_is_refused(golden, plan_of, tmp_path):
    line = refusal(plan_of, golden / "energy_k4", tokenizer="bytes")
    assert "vocab_size=97" in line and "259" in line and "--tokenizer" in line
    for key, place in (("bos_token_id", "bos_id"), ("eos_token_id", "eos_id")):
        other = tmp_path / "other.model"
        # Two of the three change places.
        ids = SPECIAL | {place: 96, "pad_id": SPECIAL[place]}
        other.write_bytes(sentencepiece_model(**ids))
        assert key in refusal(plan_of, golden / "energy_k4", tokenizer=other)


def test_no_tokenizer_is_refused_with_the_way_out(golden, plan_of):
    assert "--tokenizer=FILE" in refusal(plan_of, golden / "energy_k4", tokenizer="")


def test_a_tokenizer_that_is_none_is_refused(golden, plan_of, tmp_path):
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


# --- Where it comes from


def test_a_repository_without_a_network_is_one_line(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no\nroute\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    line = refusal(folder_of, "cccczshao/CALM-M", "--source")
    assert "--source='cccczshao/CALM-M'" in line and "no route to host" in line


@pytest.mark.parametrize("source", ["nowhere", "a/b/c", "../up", "/abs/olute", "a/..", "./x", ""])
def test_what_is_neither_folder_nor_repository_asks_no_network(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def never(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    if source:
        assert repr(source) in refusal(folder_of, source, "--source")
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    assert "is a file" in refusal(folder_of, str(file), "--source")


def test_a_repository_is_converted(golden, converted, monkeypatch, tmp_path):
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(golden / "ae_k4")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    workdir = converted(folder_of("cccczshao/CALM-M", "--source"))
    assert params(workdir)
    ((name, patterns),) = asked
    # The pickle is not fetched where there are safetensors.
    assert name == "cccczshao/CALM-M" and not any("bin" in pattern for pattern in patterns)


def test_a_repository_of_pickles_alone_is_fetched(golden, monkeypatch, tmp_path):
    folder = changed(golden / "ae_k4", tmp_path / "pickled")
    (folder / SAFE).unlink()
    asked = []

    def download(name, allow_patterns):
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert folder_of("cccczshao/CALM-M", "--source") == folder
    assert len(asked) == 2 and "pytorch_model*.bin" in asked[1]


# --- Nothing is left of what failed


def test_a_folder_that_is_there_stays_as_it_is(golden, converted, tmp_path):
    target = tmp_path / "converted"
    target.mkdir()
    (target / "mine").write_text("text")
    assert str(target) in refusal(converted, golden / "ar")
    assert listing(tmp_path) == ["converted", "converted/mine"]
    (target / "mine").unlink()
    assert params(converted(golden / "ar"))
    assert str(target) in refusal(converted, golden / "ar")
    file = tmp_path / "file"
    file.write_text("text")
    assert str(file) in refusal(converted, golden / "ar", name="file")
    assert file.read_text() == "text"


def test_damage_in_the_last_tensor_leaves_nothing(golden, converted, tmp_path):
    last = "generative_head.net.final_layer.linear.bias"

    def change(tensors):
        tensors[last][0] = np.nan

    source = changed(golden / "flow", tmp_path / "source", {}, change)
    before = listing(tmp_path)
    assert last in refusal(converted, source)
    assert listing(tmp_path) == before


def test_a_disk_that_is_full_leaves_nothing(golden, plan_of, monkeypatch, tmp_path):
    plan = plan_of(golden / "energy_k4")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, name in (
        ("calm_jax.checkpoint.ocp.CheckpointManager", "save"),
        ("calm_jax.checkpoint.ocp.CheckpointManager", "wait_until_finished"),
        ("calm_jax.data.tokenizers.Tokenizer", "save"),
        ("pathlib.Path", "write_text"),
        ("pathlib.Path", "rename"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"{place}.{name}", full)
            line = refusal(convert.convert, plan, tmp_path / "target")
        assert os.strerror(errno.ENOSPC) in line, name
        assert listing(tmp_path) == [], name


@pytest.mark.parametrize("kind", [Interrupted, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("after", [0, 40])
def test_what_is_interrupted_leaves_nothing(kind, after, golden, plan_of, monkeypatch, tmp_path):
    plan, read, count = plan_of(golden / "energy_k2"), names.read_parameter, iter(range(99))

    def interrupted(*arguments):
        if next(count) == after:
            raise kind("now")
        return read(*arguments)

    monkeypatch.setattr(names, "read_parameter", interrupted)
    with pytest.raises(kind):
        convert.convert(plan, tmp_path / "target")
    assert listing(tmp_path) == []


def test_an_export_that_fails_leaves_nothing(golden, converted, monkeypatch, tmp_path):
    workdir = converted(golden / "energy_k4")
    before = listing(tmp_path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def interrupted(*_, **__):
        raise Interrupted("now")

    for place, name in (("safetensors.numpy", "save_file"), ("pathlib.Path", "write_bytes")):
        with monkeypatch.context() as patched:
            patched.setattr(f"{place}.{name}", full)
            line = refusal(export.export, workdir, tmp_path / "out", "x")
        assert os.strerror(errno.ENOSPC) in line and listing(tmp_path) == before
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_text", interrupted)
        with pytest.raises(Interrupted):
            export.export(workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("text")
    assert str(tmp_path / "out") in refusal(export.export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path / "out") == ["mine"]


# --- What the published code cannot express


@pytest.mark.parametrize(
    ("arguments", "changes", "key"),
    [
        ("head=flow", {"lm__head__num_steps": 20}, "lm.head.num_steps=20"),
        ("head=flow", {"lm__head__solver": "euler"}, "lm.head.solver='euler'"),
        ("head=diffusion", {"lm__head__num_steps": 50}, "lm.head.num_steps=50"),
        ("head=energy", {"lm__model__norm_epsilon": 1e-5}, "lm.model.norm_epsilon=1e-05"),
    ],
)
def test_what_the_published_code_has_built_in_is_refused_by_name(arguments, changes, key, tmp_path):
    workdir = made_here(tmp_path / "ours", arguments, **changes)
    assert key in refusal(export.export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == ["ours", *(f"ours/{name}" for name in listing(tmp_path / "ours"))]


def test_an_export_of_nothing_is_refused(tmp_path):
    assert "no workdir" in refusal(export.export, Workdir(tmp_path / "no"), tmp_path / "out", "x")
    workdir = made_here(tmp_path / "ours", "head=softmax")
    shutil.rmtree(workdir.checkpoints("lm"))
    assert "train first" in refusal(export.export, workdir, tmp_path / "out", "x")


def test_a_language_model_without_its_autoencoder_is_not_exported(tmp_path):
    workdir = made_here(tmp_path / "ours", "head=energy")
    shutil.rmtree(workdir.checkpoints("autoencoder"))
    before = listing(tmp_path)
    assert "autoencoder" in refusal(export.export, workdir, tmp_path / "out", "x")
    assert listing(tmp_path) == before


def test_an_autoencoders_own_folder_tells_what_its_tensors_do_not(plan_of, tmp_path):
    changes = {"autoencoder__model__norm_epsilon": 1e-5, "autoencoder__model__kl_clamp": 0.25}
    workdir = made_here(tmp_path / "ours", "head=energy", **changes)
    out = tmp_path / "out"
    export.export(workdir, out, "autoencoder")
    # It lies where config.json says; after a move of the whole, beside the weights.
    for plan in (
        plan_of(out, out / "autoencoder", tokenizer="bytes"),
        plan_of(out, tokenizer="bytes"),
        plan_of(out.rename(tmp_path / "moved"), tokenizer="bytes"),
    ):
        assert plan.config.autoencoder.model == workdir.config.autoencoder.model
        assert plan.notes == []
    shutil.rmtree(tmp_path / "moved" / "autoencoder")
    assert "norms' epsilon" in plan_of(tmp_path / "moved", tokenizer="bytes").notes[0]


# --- The commands


@pytest.mark.slow
def test_a_dry_run_prints_every_name_and_writes_nothing(golden, tokenizer_file, tmp_path):
    arguments = (f"--source={golden / 'energy_k4'}", f"--tokenizer={tokenizer_file}", "--dry_run")
    shown = run("calm_jax.interop.convert", *arguments, f"--workdir={tmp_path / 'w'}")
    assert listing(tmp_path) == []
    assert run("calm_jax.interop.convert", *arguments) == shown
    for stage, (rows, _) in own_params(golden / "energy_k4").items():
        for row in rows:
            (line,) = re.findall(rf"^{stage}/{re.escape(row.parameter)} .*$", shown, re.M)
            assert row.published in line and "float32" in line
    assert "2 x 32 x 4 x 8" in shown


@pytest.mark.slow
def test_two_devices_write_what_one_reads(golden, tokenizer_file, converted, tmp_path):
    two = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    shown = run(
        "calm_jax.interop.convert",
        f"--source={golden / 'energy_k4'}",
        f"--tokenizer={tokenizer_file}",
        f"--workdir={tmp_path / 'two'}",
        "--config.mesh.fsdp=2",
        env=two,
    )
    assert "is ready" in shown
    assert_same(params(Workdir(tmp_path / "two")), params(converted(golden / "energy_k4")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config.chunk_size=8",), "the checkpoint decides"),
        (("--config.chunk_sighs=8",), "chunk_sighs"),
        (("--config.lm.head.solver=euler",), "solver"),
        (("--config.mesh.fsdp=2",), "does not make up 1 device"),
        (("--tokenizer=",), "--tokenizer=FILE"),
        (("--autoencoder=nowhere",), "--autoencoder='nowhere'"),
        (("more",), "unexpected argument 'more'"),
    ],
)
def test_a_refusal_of_the_command_is_one_line(arguments, words, golden, tokenizer_file, tmp_path):
    given = [f"--source={golden / 'energy_k4'}", f"--tokenizer={tokenizer_file}"]
    line = run(
        "calm_jax.interop.convert", *given, f"--workdir={tmp_path / 'w'}", *arguments, status=2
    )
    assert words in line and listing(tmp_path) == []


@pytest.mark.slow
def test_a_full_disk_ends_the_command_with_one_line_and_leaves_nothing(
    golden, tokenizer_file, tmp_path
):
    """A limit on the size of files stands in for it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION")}
    process = start(
        "calm_jax.interop.convert",
        f"--source={golden / 'energy_k4'}",
        f"--tokenizer={tokenizer_file}",
        f"--workdir={tmp_path / 'w'}",
        env=environment,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000)),
    )
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2 and "could not be written" in re.search(r"error: .*", err)[0]
    assert listing(tmp_path) == []


@pytest.mark.slow
def test_a_converted_model_generates_scores_and_trains_on(text_glob, tmp_path):  # noqa: F811
    made_here(tmp_path / "ours", "head=energy,k=2")
    out, workdir, tuned = tmp_path / "out", tmp_path / "workdir", tmp_path / "tuned"
    shown = run("calm_jax.interop.export", f"--workdir={tmp_path / 'ours'}", f"--target={out}")
    assert "num_target_samples=4" in shown and "is ready" in shown
    assert json.loads((out / "config.json").read_text())["ae_path"] == str(out / "autoencoder")
    shown = run(
        "calm_jax.interop.convert",
        f"--source={out}",
        f"--workdir={workdir}",
        "--tokenizer=bytes",
        "--config.lm.data.block_tokens=32",
        "--config.autoencoder.data.block_tokens=32",
        "--config.eval.context_tokens=16",
        "--config.eval.block_tokens=32",
        # Small, so that compiling is cheap.
        "--config.sample.num_candidates=8",
        "--config.sample.max_draws=48",
        "--config.sample.draws_at_once=16",
        "--config.sample.max_tokens=4",
    )
    assert "is ready" in shown and Workdir(workdir).is_converted

    text = run(
        "calm_jax.generate", f"--workdir={workdir}", "--prompt=def ", "--max_tokens=4", "--seed=1"
    )
    assert text.startswith("def ")

    stored = f"--config=configs/workdir.py:{workdir}"
    line = run("calm_jax.main", stored, f"--workdir={workdir}", status=2)
    assert "configs/finetune.py" in line
    before = params(Workdir(workdir))
    shown = run(
        "calm_jax.main",
        stored,
        f"--workdir={workdir}",
        "--mode=eval",
        f"--config.data.validation_files={text_glob}",
    )
    assert "converted" in shown and "BrierLM" in shown

    records = tmp_path / "records.jsonl"
    pairs = [{"prompt": f"say {i}", "completion": "x" * (i % 7 + 1)} for i in range(60)]
    records.write_text("\n".join(map(json.dumps, pairs)))
    run(
        "calm_jax.main",
        f"--config=configs/finetune.py:{workdir}",
        f"--workdir={tuned}",
        f"--config.data.train_files={records}",
        "--config.lm.training.num_steps=2",
        "--config.lm.training.batch_size=4",
        "--config.autoencoder.min_accuracy=0.0",
    )
    assert_same(params(Workdir(workdir)), before)
    after = params(Workdir(tuned))
    for name in after:
        # Two small steps from there, and the autoencoder as it was.
        np.testing.assert_allclose(after[name], before[name], atol=1e-3, err_msg=name)
        if name.startswith("autoencoder/"):
            np.testing.assert_array_equal(after[name], before[name])
    assert any((after[name] != before[name]).any() for name in after)
    assert not Workdir(tuned).is_converted


# --- Memory


# Prints in MiB: the peak after a tiny conversion, and after the real one. Not getrusage's, which begins with that of
# the process that forked.
_MEMORY = """
import pathlib, re, sys
from calm_jax.interop import convert
from calm_jax.interop.plan import make_plan
from calm_jax.interop.source import find_tokenizer
from configs import ar_m, common

for source in sys.argv[1:]:
    source = pathlib.Path(source)
    tokenizer, config = find_tokenizer("bytes", source)
    plan = make_plan(source, None, tokenizer, config, {False: ar_m.get_config()}, {})
    convert.convert(plan, source.with_name(source.name + "-converted"))
    status = pathlib.Path("/proc/self/status").read_text()
    print(int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) / 2**10)
"""


def llama(folder, width, inner, layers):
    """A random Llama of bytes; the bytes of its parameters as float32."""
    rng, tensors = np.random.default_rng(0), {}

    def add(name, *shape):
        tensors[name] = rng.standard_normal(shape, np.float32)

    add("model.embed_tokens.weight", 259, width)
    for layer in range(layers):
        beginning = f"model.layers.{layer}."
        for name in "qkvo":
            add(f"{beginning}self_attn.{name}_proj.weight", width, width)
        for name in ("gate", "up"):
            add(f"{beginning}mlp.{name}_proj.weight", inner, width)
        add(f"{beginning}mlp.down_proj.weight", width, inner)
        add(f"{beginning}input_layernorm.weight", width)
        add(f"{beginning}post_attention_layernorm.weight", width)
    add("model.norm.weight", width)
    add("lm_head.weight", 259, width)
    folder.mkdir()
    write_safetensors(folder / SAFE, tensors)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 259,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return 4 * sum(tensor.size for tensor in tensors.values())


@pytest.mark.slow
def test_a_conversion_has_one_copy_of_the_model_in_memory(tmp_path):
    llama(tmp_path / "small", 64, 96, 2)
    width, inner, layers = 768, 2048, 20
    size = llama(tmp_path / "large", width, inner, layers)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path / "small"), str(tmp_path / "large")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not done.returncode, done.stderr
    before, after = map(float, done.stdout.split())
    size, stacked = size / 2**20, 4 * width * inner * layers / 2**20
    # A second copy would be `size` more. What is written has buffers: 300 MiB here, and no more for twice the layers.
    slack = 400
    assert size > 1.3 * slack
    assert after - before < size + stacked + slack, (before, after, size, stacked)


# --- What a checkpoint says beside its numbers


def test_a_pad_row_that_is_not_zero_is_refused(golden, converted, tmp_path):
    """It would be read by PyTorch, and is not by us."""

    def change(tensors):
        tensors["transformer.embed_tokens.weight"][96, 0] = 1

    source = changed(golden / "flow", tmp_path / "source", {}, change)
    assert "row 96 of transformer.embed_tokens.weight" in refusal(converted, source)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("name", ["ar", "flow"])
def test_the_context_is_the_checkpoints(name, golden, plan_of, tmp_path):
    source = changed(golden / name, tmp_path / "source", {"max_position_embeddings": 100})
    config = plan_of(source).config
    assert config.lm.data.block_tokens == 100 * config.chunk_size
    values = published.lm_values(config, plan_of(source).tokenizer, "x")
    assert values["max_position_embeddings"] == 100


def test_the_mesh_of_a_conversion_is_not_that_of_the_workdir(golden, converted):
    workdir = converted(golden / "ar", mesh__data=1)
    assert dataclasses.asdict(workdir.config.mesh) == {"data": -1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize("key", ["init_from", "autoencoder__checkpoint"])
def test_parameters_cannot_come_from_two_places(key, golden, plan_of):
    assert key.replace("__", ".") in refusal(plan_of, golden / "flow", **{key: "runs/x"})


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_theta", 10**400), ("ae_path", "x" * 5000), ("ae_path", "a\0b"), ("beta", 10**400)],
)
def test_absurd_values_are_one_line_or_do_not_matter(key, value, golden, plan_of, tmp_path):
    source = changed(golden / "energy_k2", tmp_path / "source", {key: value})
    if key == "ae_path":
        assert plan_of(source).parts
    else:
        assert key in refusal(plan_of, source)


def test_names_that_no_file_can_have_are_one_line(golden):
    for name in ("x" * 300, "a\0b"):
        assert "--source" in refusal(folder_of, name, "--source")
        assert "--tokenizer" in refusal(find_tokenizer, name, golden)


def test_a_link_is_no_folder_to_make(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert "is there already" in refusal(refuse_existing, tmp_path / "link")
