"""Products of a single row have the same results in each platform's way: a second row on GPUs and TPUs, halves on CPUs."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.models.kv_cache import KVCache
from calm_jax.parallel import products


@pytest.fixture
def compiled_for(monkeypatch):
    """Lets the code choose as it would for another platform; the products are still this machine's."""

    def choose(platform: str) -> None:
        monkeypatch.setattr(
            products, "target_device", lambda: types.SimpleNamespace(platform=platform)
        )

    return choose


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def _pads(function, *arguments) -> bool:
    return " pad[" in str(jax.make_jaxpr(function)(*arguments))


@pytest.mark.parametrize(
    ("x_shape", "kernel_shape", "num_contracted", "padded"),
    [
        ((1, 8), (8, 3), 1, True),
        ((1, 1, 8), (8, 3, 4), 1, True),
        ((1, 1, 3, 4), (3, 4, 7), 2, True),
        ((2, 1, 8), (8, 3), 1, False),
    ],
)
def test_gpus_get_a_second_row(x_shape, kernel_shape, num_contracted, padded, compiled_for):
    x, kernel = _normal(0, x_shape, kernel_shape)
    axes = tuple(range(x.ndim - num_contracted, x.ndim)), tuple(range(num_contracted))

    def dot(x, kernel):
        return products.product(x, kernel, (axes, ((), ())))

    expected = dot(x, kernel)
    compiled_for("cuda")
    np.testing.assert_allclose(dot(x, kernel), expected, rtol=1e-5, atol=1e-5)
    assert dot(x, kernel).shape == expected.shape and _pads(dot, x, kernel) == padded


def test_the_heads_products_on_gpus_get_a_second_row_too(compiled_for):
    x, kernel = _normal(0, (1, 1, 8), (8, 3))
    expected = products.matrix_product(x, kernel)
    compiled_for("cuda")
    assert _pads(products.matrix_product, x, kernel)
    np.testing.assert_allclose(products.matrix_product(x, kernel), expected, rtol=1e-5)


@pytest.mark.parametrize(("size", "halved"), [(1, False), (7, False), (8, True), (256, True)])
def test_halves_on_cpus_equal_the_whole_product(size, halved):
    x, kernel, g = _normal(0, (1, 1, size), (size, 3), (1, 1, 3))
    # JAX would take the program of an earlier test's platform for the same function.
    program = str(jax.make_jaxpr(lambda x, kernel: products.matrix_product(x, kernel))(x, kernel))
    assert ("dimension_numbers=(([2], [1]), ([0], [0]))" in program) == halved
    result, pull = jax.vjp(products.matrix_product, x, kernel)
    np.testing.assert_allclose(result, np.asarray(x) @ kernel, rtol=1e-5, atol=1e-5)
    of_x, of_kernel = pull(g)
    np.testing.assert_allclose(of_x, g @ np.asarray(kernel).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_kernel, np.asarray(x)[0].T @ g[0], rtol=1e-5, atol=1e-5)


def test_tpus_get_a_second_query(compiled_for):
    keys, values, query, key, value = _normal(0, *((1, 6, 2, 4),) * 2, *((1, 1, 2, 4),) * 3)
    cache = KVCache(keys, values, jnp.array([3]), jnp.int32(6))
    expected = cache.attend(query, key, value)
    compiled_for("tpu")
    assert _pads(cache.attend, query, key, value)
    np.testing.assert_allclose(cache.attend(query, key, value), expected, rtol=1e-5)
