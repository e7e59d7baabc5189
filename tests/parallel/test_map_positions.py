"""`map_positions` maps each entry once, whatever the number of entries and the size of its blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.parallel.loops import map_positions


@pytest.mark.parametrize("num", [1, 2, 7, 12])
@pytest.mark.parametrize("most", [1, 2, 3, 5, 100])
def test_each_entry_is_mapped_in_its_place(num, most):
    """Arrays and keys. The function is in the program once, not a second time for a remainder."""
    keys = jax.random.split(jax.random.key(0), num)

    def of_one(xs):
        number, key = xs
        return {"square": number**2, "draw": jax.random.uniform(key)}

    numbers = jnp.arange(num, dtype=jnp.float32)
    ours = map_positions(of_one, most, (numbers, keys))
    np.testing.assert_array_equal(ours["square"], np.arange(num) ** 2)
    np.testing.assert_array_equal(ours["draw"], jax.vmap(jax.random.uniform)(keys))
    jaxpr = str(jax.make_jaxpr(lambda *xs: map_positions(of_one, most, xs))(numbers, keys))
    assert jaxpr.count("random_bits") == 1
