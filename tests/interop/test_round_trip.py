"""Conversion and export: parameters survive bit for bit both ways, and a converted model computes the recorded numbers."""

import dataclasses
import json
import shutil

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from calm_jax.interop import names, published
from calm_jax.interop.exported import export
from tests.interop.checkpoints import (
    AUTOENCODERS,
    CHECKPOINTS,
    assert_same,
    changed,
    each,
    tensors_of,
)
from tests.interop.conversions import (
    checkpoint_rows,
    one_device,
    params,
    random_workdir,
    tasks,
)
from tests.interop.weight_files import (
    BIN,
    SAFE,
    state_dict,
    write_bin,
    write_index,
    write_safetensors,
)

# --- Both ways


@pytest.mark.slow
@pytest.mark.parametrize("name", each(CHECKPOINTS))
def test_a_converted_checkpoint_is_exported_bit_for_bit(name, golden, converted, tmp_path):
    workdir = converted(golden / name)
    assert workdir.is_converted
    found = params(workdir)
    like = {stage: jax.eval_shape(t.init, jax.random.key(0)) for stage, t in tasks(workdir).items()}
    expected = {}
    for stage, (rows, weights) in checkpoint_rows(golden / name).items():
        tree = names.read_parameters(rows, weights, like[stage])
        for path, value in flax.traverse_util.flatten_dict(tree, sep="/").items():
            expected[f"{stage}/{path}"] = value
    assert_same(found, expected)

    out = tmp_path / "out"
    count = export(workdir, out, "autoencoder")
    written, before = tensors_of(out), tensors_of(golden / name)
    recorded = json.loads((golden / "state_dict_names.json").read_text())[name]
    assert set(written) == set(recorded) | {n for n in recorded if "lm_head_weight" in n}
    if name == "ae_k1":
        before["decoder.lm_head_weight"] = before["encoder.embed_tokens.weight"]
    assert_same(written, before)
    assert count == sum(value.size for value in found.values())

    # config.json has the same architecture and sizes.
    ours, theirs = (json.loads((x / "config.json").read_text()) for x in (out, golden / name))
    free = {"ae_path", "max_position_embeddings"}
    for key in (ours.keys() & theirs.keys()) - free:
        assert ours[key] == theirs[key], key
    assert theirs.keys() <= ours.keys() | {"model_type"}
    if name != "ar":
        assert "model_type" not in ours

    # Converted once more, with the exported tokenizer.
    again = converted(out, name="again", tokenizer="")
    assert_same(params(again), found)
    for section in ("chunk_size", "autoencoder", "lm"):
        assert getattr(again.config, section) == getattr(workdir.config, section)
    assert again.tokenizer.fingerprint == workdir.tokenizer.fingerprint


@pytest.mark.slow
def test_an_exported_models_card_says_that_it_decodes_without_the_token_prior(tmp_path):
    changes = {"lm__token_loss_weight": 0.5, "lm__token_prior_weight": 2.0}
    workdir = random_workdir(tmp_path / "ours", "head=energy,k=2", **changes)
    export(workdir, tmp_path / "out", "autoencoder")
    assert (
        "* lm.token_prior_weight=2.0: the published code decodes without the token predictor"
        in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    )
    # The token predictor is left out.
    assert not any("token_predictor" in name for name in tensors_of(tmp_path / "out"))


VARIANTS = {
    "head=energy,k=1": {},
    "head=energy,k=4": {"lm__model__num_kv_heads": 1},
    "head=energy,k=3": {"lm__head__beta": 1.5, "lm__head__num_blocks": 3},
    "head=diffusion,k=2": {"autoencoder__model__num_encoder_layers": 4},
    "head=flow,k=8": {
        "lm__head__num_steps": 2,
        "lm__head__solver": "euler",
        "lm__model__rms_norm_epsilon": 1e-4,
        "lm__model__num_heads": 4,
        "lm__model__num_layers": 3,
    },
    "head=softmax": {"lm__model__num_kv_heads": 1, "lm__model__rms_norm_epsilon": 1e-5},
}


@pytest.mark.parametrize("arguments", each(VARIANTS))
def test_an_exported_model_is_converted_back_bit_for_bit(arguments, converted, tmp_path):
    workdir = random_workdir(tmp_path / "ours", arguments, **VARIANTS[arguments])
    ours, config = params(workdir), workdir.config
    export(workdir, tmp_path / "out", "autoencoder")
    again = converted(tmp_path / "out", tokenizer="bytes")
    assert_same(params(again), ours)
    assert again.config.chunk_size == config.chunk_size
    assert again.config.lm.model == dataclasses.replace(config.lm.model, remat="auto")
    if not config.has_autoencoder:
        assert again.config.lm.head == config.lm.head
        return
    # The published config.json lacks the number of target samples of the energy score, and the flow's solver with its steps.
    head = again.config.lm.head
    if config.lm.head.name == "energy":
        assert "num_target_samples=4" in published.not_carried_over(config)[0]
        head = dataclasses.replace(head, num_target_samples=4)
    if config.lm.head.name == "flow":
        note = published.not_carried_over(config)[0]
        assert "lm.head.solver='euler'" in note and "lm.head.num_steps=2" in note
        head = dataclasses.replace(head, num_steps=2, solver="euler")
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


# --- Recorded numbers


def assert_near(ours, theirs):
    """Asserts agreement to 1e-4 of the largest recorded value."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.size == theirs.size
    error = np.abs(ours.reshape(theirs.shape) - theirs).max()
    assert error <= 1e-4 * np.abs(theirs).max()


@pytest.fixture
def loaded(golden, converted):
    """Converts a golden checkpoint; returns its tasks, the parameters of each, and the arrays of a recorded case."""

    def load(name, recorded):
        with np.load(golden / f"{recorded}.npz") as file:
            arrays = {key: file[key] for key in file.files}
        workdir = converted(golden / name, compute_dtype="float32")
        made = tasks(workdir)
        return made, {s: workdir.load_params(s, t, one_device()) for s, t in made.items()}, arrays

    with jax.default_matmul_precision("highest"):
        yield load


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_converted_llama_computes_the_recorded_numbers(loaded):
    made, trees, golden = loaded("ar", "ar")
    model, ids = made["lm"].model, jnp.asarray(golden["input_ids"])[..., None]
    log_probs = model.apply({"params": trees["lm"]}, ids)
    assert_near(log_probs, jax.nn.log_softmax(golden["logits"]))


# --- File formats


@pytest.mark.slow
def test_bfloat16_in_shards_and_in_a_pickle_give_the_same_float32_parameters(
    golden, converted, tmp_path
):
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


@pytest.mark.slow
def test_pickled_weights_give_the_same_parameters_as_safetensors(golden, converted, tmp_path):
    folder = changed(golden / "ae_k4", tmp_path / "pickled")
    (folder / SAFE).unlink()
    assert_same(params(converted(folder)), params(converted(golden / "ae_k4", name="other")))
