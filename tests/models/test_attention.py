"""Attention: its implementations agree, and each is refused on devices and inputs that it does not support."""

import functools
import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.errors import UserError
from calm_jax.models import attention
from calm_jax.parallel.devices import target_device
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run import preflight
from calm_jax.run.workdir import Workdir
from tests import tiny_recipe
from tests.workdirs import run, run_program


def inputs(B, L, H, G, A, dtype=jnp.float32, segments=False):
    rng = np.random.default_rng(0)

    def draw(heads):
        return jnp.asarray(rng.normal(size=(B, L, heads, A)), dtype)

    # Documents of random lengths.
    segment_BL = jnp.asarray(rng.random((B, L)) < 0.05).cumsum(1) if segments else None
    return draw(H), draw(G), draw(G), segment_BL


@functools.cache
def of(choice):
    """A function of queries, keys, values and segments: the outputs, and gradients of a sum with all different weights."""

    def weighted(query, key, value, segment):
        mixed = attention.attend(query, key, value, segment, choice)
        weight = jnp.cos(jnp.arange(mixed.size, dtype=jnp.float32)).reshape(mixed.shape)
        return (mixed.astype(jnp.float32) * weight).sum(), mixed

    return jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))


def distance(ours, expected):
    """The largest difference in any array, relative to the array's largest value."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    both = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in both)


def agree(choice, given, tolerance=1e-5):
    (_, ours), our_gradient = of(choice)(*given)
    (_, expected), gradient = of("xla")(*given)
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    assert distance((ours, our_gradient), (expected, gradient)) < tolerance


@pytest.mark.parametrize("segments", [False, True])
def test_splash_equals_xla(segments):
    """For a prime length and shared key-value heads; outputs and gradients."""
    agree("splash", inputs(2, 131, 4, 2, 8, segments=segments))


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 127, 128, 300, 2047])
@pytest.mark.parametrize(("A", "H", "G"), [(64, 2, 2), (96, 2, 1), (160, 2, 2)])
def test_splash_equals_xla_at_the_models_head_sizes(length, A, H, G):
    agree("splash", inputs(1, length, H, G, A, segments=True))


@pytest.mark.slow
def test_splash_equals_xla_in_bfloat16_up_to_rounding():
    # Two more roundings to 8 bits: of the scaled queries, and of the weights.
    agree("splash", inputs(2, 300, 4, 2, 64, jnp.bfloat16, segments=True), tolerance=2e-2)


def test_segments_attend_only_to_themselves():
    query, key, value, _ = inputs(1, 9, 2, 2, 4)
    segment = jnp.asarray([[5, 5, 5, 5, 2, 2, 5, 5, 5]])
    mixed = attention.attend(query, key, value, segment, "xla")
    # An id that returns later is the same document (packed blocks never repeat an id), so only the first two are compared.
    alone = [slice(0, 4), slice(4, 6)]
    for part in alone:
        expected = attention.attend(query[:, part], key[:, part], value[:, part], None, "xla")
        np.testing.assert_allclose(mixed[:, part], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 127, 128, 129, 300])
@pytest.mark.parametrize("segments", [False, True])
def test_blocks_equal_xla(length, segments):
    """With several queries a key-value head, at lengths around the block of 128 queries."""
    agree("blocks", inputs(2, length, 4, 2, 8, segments=segments))


@pytest.mark.parametrize("length", [31, 300])
def test_blocks_equal_xla_in_bfloat16_up_to_rounding(length):
    agree("blocks", inputs(2, length, 4, 2, 64, jnp.bfloat16, segments=True), tolerance=2e-2)


def test_auto_on_a_cpu_is_bitwise_blocks():
    given = inputs(2, 20, 4, 2, 8)
    for a, b in zip(
        jax.tree.leaves(of("auto")(*given)), jax.tree.leaves(of("blocks")(*given)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("choice", ["auto", "xla", "blocks", "splash"])
def test_implementations_that_run_on_a_cpu_are_accepted(choice):
    attention.check(choice, 64, jnp.float32, isolated=True)


def test_cudnn_on_a_cpu_is_refused():
    with pytest.raises(UserError) as raised:
        attention.check("cudnn", 64, jnp.bfloat16, isolated=False)
    line = str(raised.value)
    assert "lm.model.attention='cudnn' needs an NVIDIA GPU, and the device is cpu" in line
    assert "--config.lm.model.attention=auto" in line and "\n" not in line


def test_an_unsupported_attention_is_refused_before_a_run_writes_or_reads_anything(tmp_path):
    tree = tiny_recipe.get_config("nowhere/*.txt")
    tree.lm.model.attention = "cudnn"
    mesh = make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"lm\.model\.attention='cudnn'"):
        preflight.begin(resolve(tree), Workdir(tmp_path / "run"), False, mesh)
    assert not (tmp_path / "run").exists()


class _Device:
    def __init__(self, platform, device_kind, compute_capability="9.0"):
        self.platform, self.device_kind = platform, device_kind
        self.compute_capability = compute_capability


H100, A100 = _Device("gpu", "NVIDIA H100 80GB HBM3"), _Device("gpu", "NVIDIA A100", "8.0")
CPU = _Device("cpu", "cpu")
V5E, MI300 = _Device("tpu", "TPU v5 lite"), _Device("gpu", "AMD Instinct MI300X")


@pytest.mark.parametrize(
    ("device", "choice", "changes", "reason"),
    [
        (H100, "cudnn", {}, ""),
        (H100, "cudnn", {"head_size": 160}, ""),
        (A100, "cudnn", {"head_size": 160}, "at most 128 on this device, and it is 160"),
        (H100, "cudnn", {"head_size": 60}, "a multiple of 8"),
        (H100, "cudnn", {"dtype": jnp.float32}, "compute_dtype='bfloat16'"),
        (H100, "cudnn", {"isolated": True}, "lm.data.isolate_documents"),
        (MI300, "cudnn", {}, "needs an NVIDIA GPU"),
        (V5E, "cudnn", {}, "needs an NVIDIA GPU, and the device is TPU v5 lite"),
        (V5E, "splash", {"dtype": jnp.float32, "isolated": True}, ""),
        (H100, "splash", {}, "needs a TPU, and the device is NVIDIA H100"),
        (MI300, "auto", {}, ""),
    ],
)
def test_unsupported_devices_and_inputs_are_refused_with_the_reason(
    device, choice, changes, reason, monkeypatch
):
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    about = {"head_size": 64, "dtype": jnp.bfloat16, "isolated": False} | changes
    if not reason:
        attention.check(choice, **about)
        return
    with pytest.raises(UserError) as raised:
        attention.check(choice, **about)
    assert f"lm.model.attention={choice!r}" in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (V5E, {}, "splash"),
        (V5E, {"segments": True, "dtype": jnp.float32}, "splash"),
        (H100, {}, "cudnn"),
        (H100, {"segments": True}, "xla"),
        (H100, {"dtype": jnp.float32}, "xla"),
        (MI300, {}, "xla"),
        (CPU, {}, "blocks"),
        (CPU, {"segments": True, "dtype": jnp.float32}, "blocks"),
    ],
)
def test_auto_takes_the_fastest_supported_implementation(device, changes, expected, monkeypatch):
    chosen = []
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(attention, "_splash", lambda *_: chosen.append("splash"))
    monkeypatch.setattr(attention, "_cudnn", lambda *_: chosen.append("cudnn"))
    monkeypatch.setattr(attention, "attend_in_blocks", lambda *_: chosen.append("blocks"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, **__: chosen.append("xla"))
    attention.attend(*inputs(1, 4, 2, 2, 8, **{"dtype": jnp.bfloat16} | changes), "auto")
    assert chosen == [expected]


@pytest.mark.parametrize("length", [6, 7])
def test_cudnn_gets_even_lengths_and_padding_changes_nothing(length, monkeypatch):
    """With xla in cuDNN's place, as cuDNN itself needs a GPU."""
    given, seen = inputs(1, length, 4, 2, 8)[:3], []

    def attend(*arrays, is_causal, implementation):
        seen.append((arrays[0].shape[1], implementation))
        return xla(*arrays, is_causal=is_causal)

    xla = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    ours = attention._cudnn(*given)
    np.testing.assert_allclose(ours, xla(*given, is_causal=True), rtol=1e-5, atol=1e-6)
    assert seen == [(length + length % 2, "cudnn")]


def test_the_device_is_read_from_the_mesh_inside_a_jitted_function():
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])):
        seen = jax.jit(lambda x: x + (target_device().device_kind == "cpu"))(0)
    assert seen == 1


def on_meshes():
    """Prints, for meshes of eight devices, the largest difference between splash attention and xla's on one device."""
    # The two rows and the two key-value heads divide over an axis of two devices, and not over one of eight.
    given = inputs(2, 131, 4, 2, 8, segments=True)
    (_, mixed), gradient = of("xla")(*given)
    far = {}
    for sizes in ((2, 2, 2), (2, 1, 4), (1, 8, 1), (8, 1, 1), (1, 1, 8)):
        with jax.set_mesh(make_mesh(MeshConfig(*sizes))):
            (_, ours), our_gradient = of("splash")(*given)
            far[str(sizes)] = distance((ours, our_gradient), (mixed, gradient))
    print(json.dumps(far))


@pytest.mark.slow
def test_splash_on_a_mesh_equals_xla_on_one_device():
    program = "from tests.models.test_attention import on_meshes; on_meshes()"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    far = json.loads(run_program(program, env=environment).stdout.splitlines()[-1])
    assert len(far) == 5 and max(far.values()) < 1e-5, far


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: pip install jax[tpu]",
)
def test_splash_compiles_for_a_tpu_at_the_models_sizes():
    """Three kernels: forward, and backward for keys and values and for queries; a fourth where remat repeats the forward."""
    cases = {
        ("v5e:2x2", 64, 2047, False, "dots"): 3,
        ("v5e:2x2", 96, 2047, True, "none"): 3,
        ("v5e:2x2", 160, 2047, True, "full"): 4,
    }
    # In a process of its own.
    printed = run("tests.models.tpu_attention", *map(json.dumps, cases), env=dict(os.environ))
    found = json.loads(printed.splitlines()[-1])
    assert found == {json.dumps(case): number for case, number in cases.items()}
