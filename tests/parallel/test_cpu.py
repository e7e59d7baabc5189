"""What CPUs get of their own: products of two matrices, and an allocator that keeps freed memory."""

import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.suites.train import fresh
from calm_jax.config import resolve
from calm_jax.data.tokenizers import vocabulary
from calm_jax.models.layers import linear
from calm_jax.parallel import host_memory
from calm_jax.parallel.products import product, transposed_product
from tests.tiny_recipe import get_config
from tests.workdirs import run_program


@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "contracted"),
    [
        ((5, 8), (8, 3), ((1,), (0,))),
        ((2, 5, 8), (8, 3, 4), ((2,), (0,))),
        ((2, 5, 3, 4), (3, 4, 7), ((2, 3), (0, 1))),
        # Neither the last axes of the one nor the first of the other.
        ((2, 8, 5), (3, 8), ((1,), (1,))),
        ((2, 3, 4), (4, 3, 7), ((1, 2), (1, 0))),
    ],
)
def test_a_product_and_its_gradients_equal_those_of_dot_general(x_shape, kernel_shape, contracted):
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (x_shape, kernel_shape))
    dimensions = (contracted, ((), ()))
    expected, pull = jax.vjp(lambda *xs: jax.lax.dot_general(*xs, dimensions), x, kernel)
    ours, our_pull = jax.vjp(lambda *xs: product(*xs, dimensions), x, kernel)
    cotangent = jnp.asarray(rng.normal(size=expected.shape), jnp.float32)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(our_pull(cotangent), pull(cotangent), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_float32", [False, True])
@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "size"),
    [
        ((1, 8), (8, 3), 1),
        ((1, 7), (7, 3), 1),
        ((2, 150, 8), (8, 3), 1),
        ((2, 5, 3, 4), (3, 4, 2, 7), 2),
    ],
)
def test_a_bfloat16_product_and_its_gradients_are_sums_in_float32(
    x_shape, kernel_shape, size, in_float32
):
    """In a compiled program, as XLA chooses the layouts of its arrays. They are rounded once, and to float32 not at all."""
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in (x_shape, kernel_shape))
    kept = len(x_shape) - size
    dimensions = ((tuple(range(kept, len(x_shape))), tuple(range(size))), ((), ()))
    shape = (*x_shape[:kept], *kernel_shape[size:])
    dtype = jnp.float32 if in_float32 else jnp.bfloat16
    cotangent = jnp.asarray(rng.normal(size=shape), jnp.bfloat16).astype(dtype)

    @jax.jit
    def computed(x, kernel):
        result, pull = jax.vjp(
            lambda *xs: product(*xs, dimensions, in_float32=in_float32), x, kernel
        )
        return result, pull(cotangent)

    in_full = x.astype(jnp.float32), kernel.astype(jnp.float32)
    expected, pull = jax.vjp(lambda *xs: jax.lax.dot_general(*xs, dimensions), *in_full)
    ours, gradients = computed(x, kernel)
    assert ours.dtype == dtype
    rounding = 2**-8
    tolerance = 1e-5 if in_float32 else rounding
    np.testing.assert_allclose(ours.astype(np.float32), expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(gradients, pull(cotangent.astype(jnp.float32)), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(np.float32), b, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("features", [(5, 9), (9, 5)])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_a_transposed_product_sums_over_rows_in_whatever_order_its_result_is_stored(
    batch, features
):
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(*batch, 40, n)), jnp.bfloat16) for n in features)
    expected = jnp.swapaxes(x, -1, -2).astype(jnp.float32) @ y.astype(jnp.float32)
    ours = jax.jit(lambda x, y: transposed_product(x, y, jnp.float32))(x, y)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)
    turned = jax.jit(lambda x, y: transposed_product(x, y, jnp.float32).swapaxes(-1, -2))(x, y)
    np.testing.assert_array_equal(turned, ours.swapaxes(-1, -2))


def test_the_gradient_of_a_bfloat16_layers_bias_is_summed_in_float32():
    """Of 4096 equal terms, which a sum in bfloat16 would get wrong by several percent."""
    layer = linear(3, jnp.bfloat16)
    x = jnp.zeros((4096, 2), jnp.bfloat16)
    params = layer.init(jax.random.key(0), x)

    def loss(params):
        return (layer.apply(params, x) * jnp.bfloat16(0.7)).astype(jnp.float32).sum()

    gradient = jax.jit(jax.grad(loss))(params)["params"]["bias"]
    np.testing.assert_array_equal(gradient, np.full(3, 4096 * np.float32(jnp.bfloat16(0.7))))


@pytest.mark.slow
def test_a_step_keeps_less_when_its_layers_are_computed_again():
    """With the pass that removes barriers, all three would keep as much."""
    temporaries = {}
    for remat in ("none", "dots", "full"):
        tree = get_config("*.txt,head=softmax")
        tree.lm.model.num_layers, tree.lm.model.remat = 4, remat
        tree.lm.model.attention = "blocks"
        config = resolve(tree)
        trained = fresh(config, "lm", vocabulary(config.tokenizer))
        with jax.set_mesh(trained.mesh):
            lowered = trained.step.lower(trained.state, trained.frozen, trained.batch)
        temporaries[remat] = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporaries["full"] < 0.9 * temporaries["dots"]
    assert temporaries["dots"] < 0.9 * temporaries["none"]


# A program whose temporaries are 64 MiB: prints how many pages a call touches for the first time, the least of ten calls.
PAGES = """
import resource, sys
import jax, jax.numpy as jnp
from calm_jax.parallel.host_memory import keep_freed_memory
if "keep" in sys.argv:
    assert keep_freed_memory()
f = jax.jit(lambda x: jax.lax.optimization_barrier(jnp.sin(x + jnp.arange(2.0**24))).sum())
fresh = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    f(1.0).block_until_ready()
    fresh.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(fresh))
"""


# Frees 100 MiB of small pieces below one that stays, compiles a program, and prints the MiB of memory before and after.
RETURNED = """
import pathlib, resource
import jax
from calm_jax.parallel import host_memory
assert host_memory.keep_freed_memory()
host_memory.return_compilers_memory()
host_memory._LONG_COMPILATION = 0.0
def mebibytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
x = jax.numpy.ones(3)
pieces = [bytes(1000 + i % 2) for i in range(100 << 10)]
kept = pieces[-1]
del pieces
before = mebibytes()
jax.jit(lambda x: x + 1)(x)
print(before, mebibytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_that_was_freed_before_a_compilations_end_is_returned():
    before, after = map(int, run_program(RETURNED).stdout.split())
    assert before - after > 80


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_a_repeated_call_touches_no_fresh_pages():
    def pages(*options):
        return int(run_program(PAGES, *options).stdout)

    # 64 MiB are 16,384 pages of 4 KiB.
    assert pages("keep") < 1000 < 10_000 < pages()


@pytest.mark.parametrize(
    ("chosen", "expected"), [("cpu", True), ("cuda,cpu", False), ("tpu", False)]
)
def test_the_platforms_of_the_environment_decide_whether_freed_memory_is_kept(
    chosen, expected, monkeypatch
):
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    assert host_memory.computes_on_cpus() is expected


@pytest.mark.parametrize("installed", [None, "libtpu", "jax_plugins"])
def test_without_a_choice_an_installed_plugin_decides(installed, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(host_memory.importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(host_memory.importlib.util, "find_spec", lambda name: name == installed)
    assert host_memory.computes_on_cpus() is (installed is None)
