"""The tables of published names: parameters survive the way to published tensors and back."""

import flax.traverse_util
import jax
import numpy as np
import pytest
import safetensors.numpy

from calm_jax.interop import names, published
from calm_jax.interop.parity import models
from calm_jax.interop.weights import Weights
from calm_jax.tasks import AutoencoderTask
from tests.interop.checkpoints import CHECKPOINTS, read_all


def model_and_rows(folder):
    """The parameters of a golden checkpoint, the shapes that its task initialises, and its table of names."""
    kind = published.PublishedConfig(folder).architecture
    if kind == published.AUTOENCODER:
        autoencoder = models.PublishedAutoencoder(folder)
        task = AutoencoderTask(autoencoder.model, 0, random_chunks=0.0)
        params, rows = autoencoder.variables["params"], autoencoder.rows
    else:
        lm = (models.PublishedLlama if kind == published.AUTOREGRESSIVE else models.PublishedCalm)(
            folder
        )
        task, params, rows = lm.task, lm.params, lm.rows
    return params, jax.eval_shape(task.init, jax.random.key(0)), rows


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parameters_go_to_published_names_and_back_bit_for_bit(name, golden, tmp_path):
    params, made, rows = model_and_rows(golden / name)
    tensors = read_all(golden / name)
    written = names.write_parameters(rows, params)
    for published_name, tensor in written.items():
        assert tensor.dtype == tensors[published_name].dtype
        np.testing.assert_array_equal(tensor, tensors[published_name], err_msg=published_name)
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in written.items()},
        tmp_path / "model.safetensors",
    )
    again = names.read_parameters(rows, Weights(tmp_path), made)
    jax.tree.map(np.testing.assert_array_equal, again, params)

    # The tensors without a row are aliases, or belong to the included autoencoder.
    twice = {"decoder.lm_head_weight"} | {
        name.replace("mlp_generator.", "generative_head.", 1)
        for name in written
        if name.startswith("mlp_generator.")
    }
    left_out = {name for name in tensors if not name.startswith("ae_model.")} - set(written)
    assert left_out <= twice

    # The parameters have the names and shapes that the model initialises.
    flat, made = (flax.traverse_util.flatten_dict(tree, sep="/") for tree in (params, made))
    assert {path: leaf.shape for path, leaf in flat.items()} == {
        path: leaf.shape for path, leaf in made.items()
    }


@pytest.mark.slow
def test_a_linear_is_stored_as_the_transpose(golden):
    config = published.PublishedConfig(golden / "energy_k4")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    params, _, _ = model_and_rows(golden / "energy_k4")
    tensors = read_all(golden / "energy_k4")
    attention = params["backbone"]["layers"]["attention"]
    x = np.random.default_rng(0).normal(size=width)

    ours = np.einsum("d,dha->ha", x, attention["query"]["kernel"][1])
    theirs = tensors["transformer.layers.1.self_attn.q_proj.weight"] @ x
    np.testing.assert_allclose(ours, theirs.reshape(heads, -1), rtol=1e-6)
    ours = np.einsum("ha,had->d", theirs.reshape(heads, -1), attention["output"]["kernel"][1])
    theirs = tensors["transformer.layers.1.self_attn.o_proj.weight"] @ theirs
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
