"""The cache that is read block by block on CPUs gives what the cache that is read whole does."""

import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.models.kv_cache import BLOCK, KVCache, UnslicedLayer

LAYERS, B = 3, 4


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
# Products are elementwise for 1 or 2 query heads per key-value head; 12 is no multiple of the sums that are computed together.
@pytest.mark.parametrize(("H", "G", "A"), [(2, 2, 16), (4, 2, 12), (6, 2, 8)])
@pytest.mark.parametrize(
    ("places", "lengths", "window"),
    [
        (2 * BLOCK, (0, 1, BLOCK, 2 * BLOCK - 1), 1000),
        (4 * BLOCK, (3, BLOCK - 1, BLOCK + 1, 2 * BLOCK), BLOCK // 2),
        # The text has outgrown its cache, or its blocks are smaller because 32 does not divide the places.
        (2 * BLOCK, (5, 2 * BLOCK, 2 * BLOCK + 7, 9 * BLOCK), 2 * BLOCK - 1),
        (BLOCK + 8, (0, 7, BLOCK, BLOCK + 7), 1000),
        (BLOCK // 2, (0, 1, 2, BLOCK), 3),
    ],
)
def test_blocks_of_a_cache_give_the_attention_to_all_of_it(places, lengths, window, H, G, A, dtype):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    shape = (LAYERS, B, G, places, A)
    # Places that were never written hold numbers, too, which must not count.
    cache = KVCache(draw(*shape), draw(*shape), jnp.array(lengths), jnp.int32(window))
    new = draw(B, 1, H, A), draw(B, 1, G, A), draw(B, 1, G, A)
    for layer in range(LAYERS):
        sliced = cache.for_layers()
        sliced = sliced._replace(key=sliced.key[layer], value=sliced.value[layer])
        whole = sliced.attend(*new)
        blocks = UnslicedLayer(cache, jnp.int32(layer)).attend(*new)
        assert blocks.dtype == whole.dtype and blocks.shape == whole.shape
        # Weights are rounded to bfloat16, of which 1 has a spacing of 1/128, before or after they are divided by their sum.
        tolerance = 1e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(
            blocks.astype(jnp.float32), whole.astype(jnp.float32), atol=tolerance, rtol=tolerance
        )
