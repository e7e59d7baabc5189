"""The rotary embedding's factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.models.layers import rotation_at


@pytest.mark.parametrize("positions", [[[0, 0]], [[0, 5]], [[3, 7], [0, 1]]])
def test_the_rotary_factors_are_those_of_each_position(positions):
    position_BL = jnp.array(positions)
    rotation = rotation_at(position_BL, head_size=6, theta=100.0)
    angle_BLA = np.asarray(positions)[..., None] * 100.0 ** -np.array([0, 1 / 3, 2 / 3])
    np.testing.assert_allclose(rotation.cos, np.cos(angle_BLA), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rotation.sin, np.sin(angle_BLA), rtol=1e-5, atol=1e-6)
    # In a branch, with which CPUs compute them once for all layers.
    assert "cond[" in str(jax.make_jaxpr(rotation_at, static_argnums=(1, 2))(position_BL, 6, 100.0))
