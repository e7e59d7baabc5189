"""The command verify: the golden numbers agree, every kind of difference fails, and a damaged golden set is one line."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
from absl import flags

from calm_jax.errors import UserError
from calm_jax.interop import published, verify
from calm_jax.interop.parity import comparison, expected
from calm_jax.interop.parity.recorded import up_to_eos


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    flags.FLAGS.mark_as_parsed()


@pytest.fixture
def copied(golden, tmp_path):
    """Copies cases of the golden set, with their checkpoints, to a new folder."""

    def copy(*cases):
        for case in cases:
            shutil.copy(golden / f"{case}.npz", tmp_path)
            if (golden / case).is_dir():
                shutil.copytree(golden / case, tmp_path / case)
        return tmp_path

    return copy


def change_array(file, key, change):
    """Changes one array of an npz file; deletes it if `change` returns None."""
    with np.load(file) as arrays:
        kept = {name: arrays[name] for name in arrays.files}
    kept[key] = change(kept[key])
    np.savez(file, **{name: value for name, value in kept.items() if value is not None})


def change_tensor(folder, name, change):
    """Changes one tensor of a checkpoint; deletes it if `change` returns None."""
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors[name] = change(tensors[name].copy())
    safetensors.numpy.save_file({n: t for n, t in tensors.items() if t is not None}, file)


def status_of(*arguments):
    """The exit status of the command with these arguments."""
    with pytest.raises(SystemExit) as stop:
        verify.main(["verify", *map(str, arguments)])
    return stop.value.code


def assert_one_line_error(capsys, *parts):
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(part in error for part in parts), error


# --- The golden set


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["pytorch_model.bin", "shards"])
def test_the_checkpoint_of_a_case_may_be_pickled_or_sharded(kept, copied):
    folder = copied("ae_k4") / "ae_k4"
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if kept == "shards":
        (folder / "pytorch_model.bin").unlink()
        where = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
        for file in set(where.values()):
            part = {name: tensors[name] for name in tensors if where[name] == file}
            safetensors.numpy.save_file(part, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    rows, unknown = comparison.verify(folder.parent)
    assert rows and all(row.passed for row in rows) and not unknown


@pytest.fixture(scope="module")
def verified(golden):
    """The rows of the whole golden set, which takes half a minute, and its unknown cases."""
    return comparison.verify(golden)


@pytest.mark.slow
def test_every_golden_quantity_agrees(golden, verified):
    rows, unknown = verified
    assert [row for row in rows if not row.passed] == []
    assert unknown == []
    assert {row.case for row in rows} == {file.stem for file in golden.glob("*.npz")}

    # Every recorded gradient and the main quantities of each case were compared.
    compared = {(row.case, row.quantity) for row in rows}
    for file in golden.glob("*.npz"):
        with np.load(file) as arrays:
            for key in arrays.files:
                if key.startswith("grad/"):
                    assert (file.stem, f"gradient {key.removeprefix('grad/')}") in compared
    for case in ("energy_k2", "energy_k4"):
        for quantity in ("hidden states", "head draws", "energy score", "training loss"):
            assert (case, quantity) in compared
    for case in ("energy_k2", "energy_k4", "ar"):
        assert (case, "Brier 1 to 4") in compared
    assert {("energy_k2_generate", "tokens"), ("energy_k4_generate", "tokens")} <= compared
    assert {("ar", "greedy tokens"), ("ar", "logits"), ("ar", "loss")} <= compared
    for case, quantities in {
        "diffusion_head": ("network", "variational bound", "loss", "sampling, noise x 1"),
        "flow_head": (
            "velocity",
            "loss",
            "sampling, 10 midpoint steps",
            "sampling, 20 euler steps",
        ),
        "diffusion_model": ("training loss",),
        "flow_model": ("training loss",),
    }.items():
        assert {(case, quantity) for quantity in quantities} <= compared


@pytest.mark.slow
def test_an_unchanged_copy_passes(copied, capsys):
    assert status_of(copied("temperature")) == 0
    shown = capsys.readouterr().out
    assert "FAIL" not in shown and re.search(r"^(\d+) of \1 quantities agree", shown, re.M)


# --- Differences fail


@pytest.mark.slow
def test_a_changed_recorded_array_fails(copied, capsys):
    folder = copied("temperature")
    with np.load(folder / "temperature.npz") as arrays:
        key = next(name for name in arrays.files if name.endswith("/probs"))
    change_array(folder / "temperature.npz", key, lambda probs: probs * 1.001)
    assert status_of(folder) == 1
    shown = capsys.readouterr().out
    assert shown.count("FAIL") == 1 and "11 of 12 quantities agree" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "tensor",
    ["encoder.squeeze_layer.bias", "decoder.decoder_layers.1.layernorm.weight"],
)
def test_a_changed_weight_of_an_autoencoder_fails(tensor, copied):
    folder = copied("ae_k1")

    def change(weight):
        weight[3] += 1e-2
        return weight

    change_tensor(folder / "ae_k1", tensor, change)
    assert status_of(folder) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tensor", "quantity"),
    [
        ("energy_k4", "transformer.layers.1.self_attn.v_proj.weight", "hidden states"),
        ("energy_k4", "mlp_generator.mlp_blocks.2.linears.0.bias", "head draws"),
        ("ae_k4", "encoder.hidden_to_latent.bias", "target mean"),
    ],
)
def test_a_changed_weight_of_an_energy_model_fails_at_its_quantity(model, tensor, quantity, copied):
    folder = copied("energy_k4", "ae_k4")
    (folder / "ae_k4.npz").unlink()

    def change(weight):
        weight.flat[3] += 1e-2
        return weight

    change_tensor(folder / model, tensor, change)
    rows, _ = comparison.verify(folder)
    failing = [row.quantity for row in rows if not row.passed]
    # The first quantity to fail is the one that the weight acts on: those before it do not depend on it.
    assert failing[0] == quantity


@pytest.mark.slow
def test_a_changed_token_fails(copied):
    folder = copied("energy_k2_generate", "energy_k2", "ae_k2")
    for case in ("energy_k2", "ae_k2"):
        (folder / f"{case}.npz").unlink()

    def change(tokens):
        tokens[1, -1] = (tokens[1, -1] + 1) % 90
        return tokens

    assert status_of(folder) == 0
    change_array(folder / "energy_k2_generate.npz", "tokens", change)
    assert status_of(folder) == 1


NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([NAN, 1.0], [1.0, 1.0]),
        ([1.0, 1.0], [NAN, 1.0]),
        ([NAN, 1.0], [NAN, 1.0]),
        ([np.inf, 1.0], [np.inf, 1.0]),
        ([NAN, 1.0], [1, 1]),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_never_pass(ours, expected):
    assert not comparison.compare("case", "quantity", np.array(ours), np.array(expected)).passed


@pytest.mark.parametrize(
    ("ours", "expected", "passes"),
    [
        ([1.0, 100.0], [1.009, 100.0], True),  # 9e-5 of the largest value
        ([1.0, 100.0], [1.011, 100.0], False),
        ([1.0, 2.0], [1.0, 2.0, 3.0], False),
        ([[1.0, 2.0]], [1.0, 2.0], False),
        ([1, 2000000], [1, 2000000], True),
        ([1, 2000000], [2, 2000000], False),
        ([True], [False], False),
    ],
)
def test_floats_agree_to_the_tolerance_and_integers_exactly(ours, expected, passes):
    row = comparison.compare("case", "quantity", np.array(ours), np.array(expected))
    assert row.passed == passes


@pytest.mark.parametrize(("ours", "passes"), [(0.0, True), (1e-9, False)])
def test_recorded_zeros_agree_only_with_zeros(ours, passes):
    row = comparison.compare("case", "quantity", np.full(2, ours), np.zeros(2))
    assert row.passed == passes


def test_nan_is_the_worst_error_of_all_gradients():
    rows = [comparison.Row("case", f"gradient {i}", v, v) for i, v in enumerate((0.0, NAN, 0.0))]
    (shown,) = comparison.worst_of_kind(rows)
    assert not shown.passed


# --- Unreadable golden sets


@pytest.mark.slow
def test_an_unknown_case_is_named_and_skipped(copied, capsys):
    folder = copied("temperature")
    np.savez(folder / "mystery.npz", x=np.zeros(2))
    rows, unknown = comparison.verify(folder)
    assert unknown == ["mystery"] and {row.case for row in rows} == {"temperature"}
    assert status_of(folder) == 0
    assert "mystery" in capsys.readouterr().out


def test_compressed_arrays_that_would_fill_the_memory_are_refused(copied, monkeypatch):
    folder = copied("temperature")
    file = folder / "temperature.npz"
    with np.load(file) as arrays:
        kept = dict(arrays)
    np.savez_compressed(file, **kept)
    total = sum(array.nbytes for array in kept.values())
    rows, _ = comparison.verify(folder)
    assert all(row.passed for row in rows)
    monkeypatch.setattr(comparison, "_MOST_ARRAY_BYTES", total)
    ((row,), _) = comparison.verify(folder)
    assert not row.passed and "its arrays have more than 0 MiB" in row.quantity


def test_a_folder_of_unknown_cases_is_an_error(tmp_path, capsys):
    np.savez(tmp_path / "mystery.npz", x=np.zeros(2))
    assert status_of(tmp_path) == 2
    assert_one_line_error(capsys, str(tmp_path), "mystery.npz", "known")


def test_a_missing_folder_is_an_error(tmp_path, capsys):
    assert status_of(tmp_path / "nowhere") == 2
    assert_one_line_error(capsys, "nowhere")


def test_a_folder_without_cases_is_an_error(tmp_path, capsys):
    assert status_of(tmp_path) == 2
    assert_one_line_error(capsys, str(tmp_path), "npz")


@pytest.mark.parametrize("arguments", [(), ("a", "b")])
def test_wrong_arguments_print_the_usage(arguments, capsys):
    assert status_of(*arguments) == 2
    assert_one_line_error(capsys, "usage: ")


# --- Cases that cannot be read fail, and the others go on


def assert_fails(folder, capsys, *parts):
    """One failed quantity names the parts; the case that is beside it passes."""
    assert status_of(folder) == 1
    rows, _ = comparison.verify(folder)
    (failed,) = [row for row in rows if not row.passed]
    assert all(part in failed.quantity for part in parts), failed
    assert any(row.passed for row in rows if row.case == "temperature")
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"no arrays"])
def test_a_damaged_npz_file_fails(content, copied, capsys):
    folder = copied("temperature")
    (folder / "ae_k1.npz").write_bytes(content)
    assert_fails(folder, capsys, "ae_k1.npz", "cannot be read")


def test_a_pipe_in_the_place_of_an_npz_file_fails(copied, capsys):
    folder = copied("temperature")
    os.mkfifo(folder / "ae_k1.npz")
    assert_fails(folder, capsys, "ae_k1.npz", "cannot be read")


def test_a_truncated_npz_file_fails(copied, capsys):
    file = copied("ae_k1", "temperature") / "ae_k1.npz"
    file.write_bytes(file.read_bytes()[:2000])
    assert_fails(file.parent, capsys, "ae_k1.npz", "cannot be read")


def test_a_missing_array_fails_alone(copied, capsys):
    folder = copied("temperature")
    with np.load(folder / "temperature.npz") as arrays:
        key = next(name for name in arrays.files if name.endswith("/probs"))
    complete, _ = comparison.verify(folder)
    change_array(folder / "temperature.npz", key, lambda _: None)
    assert_fails(folder, capsys, key)
    rows, _ = comparison.verify(folder)
    assert sum(row.passed for row in rows) == len(complete) - 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ae_k1", "ar"])
def test_missing_gradients_are_named(case, copied):
    """All of them are removed, so that nothing in the file shows that they were there."""
    file = copied(case) / f"{case}.npz"
    with np.load(file) as arrays:
        kept = {name: arrays[name] for name in arrays.files if not name.startswith("grad/")}
        removed = set(arrays.files) - set(kept)
    np.savez(file, **kept)
    rows, _ = comparison.verify(file.parent)
    # Each is named in the short table too, where the compared gradients are one line.
    failed = [row.quantity for row in comparison.worst_of_kind(rows) if not row.passed]
    assert len(failed) == len(removed) > 0
    assert all(any(repr(name) in quantity for quantity in failed) for name in removed)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("ae_k1", expected.AUTOENCODER_GRADIENTS),
        ("ae_k8", expected.AUTOENCODER_GRADIENTS),
        ("energy_k2", expected.ENERGY_GRADIENTS),
        ("energy_k4", expected.ENERGY_GRADIENTS),
        ("ar", expected.AUTOREGRESSIVE_GRADIENTS),
        ("diffusion_head", expected.DIFFUSION_HEAD_GRADIENTS),
        ("flow_head", expected.FLOW_HEAD_GRADIENTS),
        ("diffusion_model", expected.MODEL_GRADIENTS),
        ("flow_model", expected.MODEL_GRADIENTS),
    ],
)
def test_all_recorded_gradients_are_expected(case, names, golden):
    with np.load(golden / f"{case}.npz") as arrays:
        recorded = {name.removeprefix("grad/") for name in arrays.files if "grad/" in name}
    assert recorded == set(names)


@pytest.mark.parametrize("name", ["n2_plain/", "n3_plain/", "n3_plain/unique"])
def test_a_missing_case_of_temperatures_is_named_and_the_others_are_compared(name, copied):
    file = copied("temperature") / "temperature.npz"
    complete, _ = comparison.verify(file.parent)
    with np.load(file) as arrays:
        kept = {key: arrays[key] for key in arrays.files if not key.startswith(name)}
    np.savez(file, **kept)
    rows, _ = comparison.verify(file.parent)
    (failed,) = [row for row in rows if not row.passed]
    assert name in failed.quantity
    case = name.split("/")[0]
    others = [row for row in complete if not row.quantity.startswith(case)]
    assert [row for row in rows if row.passed] == others


@pytest.mark.slow
def test_a_gradient_of_no_parameter_fails_alone(copied, verified):
    file = copied("ar") / "ar.npz"
    complete = [row for row in verified[0] if row.case == "ar"]
    with np.load(file) as arrays:
        np.savez(file, **arrays, **{"grad/nonsense": np.ones(3)})
    rows, _ = comparison.verify(file.parent)
    (failed,) = [row for row in rows if not row.passed]
    assert failed.quantity == "gradient nonsense, which is no parameter"
    assert [row for row in rows if row.passed] == complete


def test_a_file_without_arrays_fails(tmp_path, capsys):
    np.savez(tmp_path / "temperature.npz")
    np.savez(tmp_path / "mystery.npz", x=np.zeros(2))
    assert status_of(tmp_path) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_case_of_which_nothing_is_compared_fails(copied, monkeypatch):
    monkeypatch.setitem(comparison.cases.CASES, "temperature", lambda folder, golden: iter(()))
    ((row,), _) = comparison.verify(copied("temperature"))
    assert not row.passed and "nothing was compared" in row.quantity
    assert not comparison.compare("case", "quantity", np.zeros((0, 2)), np.zeros((0, 2))).passed


@pytest.mark.slow
def test_what_needs_a_missing_array_fails_by_its_name(copied, capsys):
    folder = copied("temperature", "ae_k1")
    change_array(folder / "ae_k1.npz", "dec_latents", lambda _: None)
    assert_fails(folder, capsys, "dec_latents", "the remaining quantities need")
    # What comes before was compared.
    rows, _ = comparison.verify(folder)
    assert [row.quantity for row in rows if row.case == "ae_k1" and row.passed]


@pytest.mark.slow
def test_an_array_of_another_shape_ends_its_case_alone(copied, capsys):
    folder = copied("temperature", "ae_k1")
    change_array(folder / "ae_k1.npz", "dec_latents", lambda latents: latents[..., :-1])
    assert_fails(folder, capsys, "cannot be computed")


def test_a_missing_tensor_is_named(copied, capsys):
    folder = copied("ae_k1", "temperature")
    change_tensor(folder / "ae_k1", "encoder.encoder_layers.1.mlp.up_proj.weight", lambda _: None)
    assert_fails(folder, capsys, "encoder.encoder_layers.1.mlp.up_proj.weight")


def test_a_missing_checkpoint_fails(golden, copied, capsys):
    folder = copied("temperature")
    shutil.copy(golden / "ae_k1.npz", folder)
    assert_fails(folder, capsys, "ae_k1")


@pytest.mark.parametrize("size", [0, 500])
def test_a_damaged_safetensors_file_fails(size, copied, capsys):
    file = copied("ae_k1", "temperature") / "ae_k1" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert_fails(file.parent.parent, capsys, "model.safetensors")


def test_a_weight_of_wrong_shape_fails(golden, copied, capsys):
    folder = copied("ae_k1", "temperature")
    shutil.copy(golden / "ae_k2" / "model.safetensors", folder / "ae_k1")
    assert_fails(folder, capsys, "encoder.squeeze_layer.weight")


def test_a_missing_key_of_config_json_fails(copied, capsys):
    file = copied("ae_k1", "temperature") / "ae_k1" / "config.json"
    file.write_text(file.read_text().replace('"latent_size"', '"latent_sighs"'))
    assert_fails(file.parent.parent, capsys, "config.json", "latent_size")


def test_tokens_behind_eos_are_not_compared():
    """In the prompt it is a token like others."""
    eos, ours = 9, np.array([[9, 1, 5, 9, 3, 9], [1, 1, 2, 3, 4, 5]])
    expected = [[9, 1, 5, 9, -1, -1], [1, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(up_to_eos(ours, 2, eos), expected)


# --- Architectures


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ('"rope_scaling": null', '"rope_scaling": {"factor": 8.0}'),
        ('"attention_bias": false', '"attention_bias": true'),
        ('"mlp_bias": false', '"mlp_bias": true'),
        ('"hidden_act": "silu"', '"hidden_act": "gelu"'),
        ('"tie_word_embeddings": false', '"tie_word_embeddings": true'),
    ],
)
def test_an_unsupported_architecture_is_refused_by_its_key(ours, theirs, golden, tmp_path):
    text = (golden / "energy_k4" / "config.json").read_text()
    assert ours in text
    (tmp_path / "config.json").write_text(text.replace(ours, theirs))
    with pytest.raises(UserError, match=ours.split('"')[1]):
        published.PublishedConfig(tmp_path).refuse_unsupported()
    published.PublishedConfig(golden / "energy_k4").refuse_unsupported()
