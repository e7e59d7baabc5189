"""Attention: the ways to compute it agree, and each refuses what it cannot do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.mesh import MeshConfig, make_mesh
from calm_jax.models import attention


def inputs(B, L, H, G, A, dtype=jnp.float32, segments=False):
    rng = np.random.default_rng(0)

    def draw(heads):
        return jnp.asarray(rng.normal(size=(B, L, heads, A)), dtype)

    # Documents of random lengths.
    segment_BL = jnp.asarray(rng.random((B, L)) < 0.05).cumsum(1) if segments else None
    return draw(H), draw(G), draw(G), segment_BL


@functools.cache
def of(choice):
    """Outputs and the gradients of a sum of them with weights that no place shares."""

    def weighted(query, key, value, segment):
        mixed = attention.attend(query, key, value, segment, choice)
        weight = jnp.cos(jnp.arange(mixed.size, dtype=jnp.float32)).reshape(mixed.shape)
        return (mixed.astype(jnp.float32) * weight).sum(), mixed

    return jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))


def assert_same(ours, expected, tolerance):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def agree(choice, given, tolerance=1e-5):
    (_, ours), our_gradient = of(choice)(*given)
    (_, expected), gradient = of("xla")(*given)
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    assert_same((ours, our_gradient), (expected, gradient), tolerance)


@pytest.mark.parametrize("segments", [False, True])
def test_splash_is_xla(segments):
    """Of a length that is no multiple of anything, and with shared keys and values."""
    agree("splash", inputs(2, 131, 4, 2, 8, segments=segments))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 127, 128, 300, 2047])
@pytest.mark.parametrize(("A", "H", "G"), [(64, 2, 2), (96, 2, 1), (160, 2, 2)])
def test_splash_is_xla_at_the_models_sizes(length, A, H, G):
    agree("splash", inputs(1, length, H, G, A, segments=True))


@pytest.mark.slow
def test_splash_is_xla_but_for_rounding_in_bfloat16():
    # Two roundings to 8 bits more: of the scaled queries, and of the weights.
    agree("splash", inputs(2, 300, 4, 2, 64, jnp.bfloat16, segments=True), tolerance=2e-2)


def test_segments_are_documents_for_themselves():
    query, key, value, _ = inputs(1, 9, 2, 2, 4)
    segment = jnp.asarray([[5, 5, 5, 5, 2, 2, 5, 5, 5]])
    mixed = attention.attend(query, key, value, segment, "xla")
    # A number that comes back is the same document; the data gives no number twice.
    alone = [slice(0, 4), slice(4, 6)]
    for part in alone:
        expected = attention.attend(query[:, part], key[:, part], value[:, part], None, "xla")
        np.testing.assert_allclose(mixed[:, part], expected, rtol=1e-5, atol=1e-6)


def test_auto_on_a_cpu_is_xla_to_the_bit():
    given = inputs(2, 20, 4, 2, 8)
    for a, b in zip(
        jax.tree.leaves(of("auto")(*given)), jax.tree.leaves(of("xla")(*given)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("choice", ["auto", "xla", "splash"])
def test_what_runs_on_a_cpu_is_not_refused(choice):
    attention.check(choice, 64, jnp.float32, isolated=True)


def test_cudnn_on_a_cpu_is_refused():
    with pytest.raises(UserError) as raised:
        attention.check("cudnn", 64, jnp.bfloat16, isolated=False)
    line = str(raised.value)
    assert "lm.model.attention='cudnn' needs an NVIDIA GPU, and this is for cpu" in line
    assert "--config.lm.model.attention=auto" in line and "\n" not in line


class _Device:
    def __init__(self, platform, device_kind, compute_capability="9.0"):
        self.platform, self.device_kind = platform, device_kind
        self.compute_capability = compute_capability


H100, A100 = _Device("gpu", "NVIDIA H100 80GB HBM3"), _Device("gpu", "NVIDIA A100", "8.0")
V5E, MI300 = _Device("tpu", "TPU v5 lite"), _Device("gpu", "AMD Instinct MI300X")


@pytest.mark.parametrize(
    ("device", "choice", "changes", "reason"),
    [
        (H100, "cudnn", {}, ""),
        (H100, "cudnn", {"head_size": 160}, ""),
        (A100, "cudnn", {"head_size": 160}, "at most 128 here, and these have 160"),
        (H100, "cudnn", {"head_size": 60}, "a multiple of 8 features"),
        (H100, "cudnn", {"dtype": jnp.float32}, "compute_dtype='bfloat16'"),
        (H100, "cudnn", {"isolated": True}, "lm.data.isolate_documents"),
        (MI300, "cudnn", {}, "needs an NVIDIA GPU"),
        (V5E, "cudnn", {}, "needs an NVIDIA GPU, and this is for TPU v5 lite"),
        (V5E, "splash", {"dtype": jnp.float32, "isolated": True}, ""),
        (H100, "splash", {}, "needs a TPU, and this is for NVIDIA H100"),
        (MI300, "auto", {}, ""),
    ],
)
def test_what_a_device_cannot_do_is_refused_in_a_line(
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
    ],
)
def test_auto_is_what_the_device_has(device, changes, expected, monkeypatch):
    chosen = []
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(attention, "_splash", lambda *_: chosen.append("splash"))
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *_, implementation, **__: chosen.append(implementation),
    )
    attention.attend(*inputs(1, 4, 2, 2, 8, **{"dtype": jnp.bfloat16} | changes), "auto")
    assert chosen == [expected]


def test_the_mesh_says_what_it_is_for():
    with jax.set_mesh(make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1])):
        seen = jax.jit(lambda x: x + (attention._device().device_kind == "cpu"))(0)
    assert seen == 1
