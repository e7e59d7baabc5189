"""The network that the diffusion and the flow head share: a residual MLP with adaptive layer norm (AdaLN).

Time and hidden state make the condition, which modulates the normalised input of every block.
P positions, N draws or targets of each, D width, Z latent size.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from calm_jax.losses import Posterior
from calm_jax.models.layers import layer_norm, linear, linear_in_float32, normal_init, silu
from calm_jax.models.stack import keeping_products, stack
from calm_jax.parallel.constraints import constrain

# The time embedding has this many cosines and as many sines; the longest wavelength is 2 pi times _LONGEST_PERIOD.
_NUM_FREQUENCIES = 128
_LONGEST_PERIOD = 1e4

_xavier = nn.initializers.xavier_uniform()


def time_features(time: Array) -> Array:
    """128 cosines, then 128 sines, of integer times 0 to 999: [...] -> [..., 256] float32."""
    exponent = jnp.arange(_NUM_FREQUENCIES, dtype=jnp.float32) / _NUM_FREQUENCIES
    angle = time[..., None].astype(jnp.float32) * _LONGEST_PERIOD**-exponent
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def training_draws(
    posterior: Posterior,
    num_samples: int,
    key_P: Array,
    draw_times: Callable[[Array, tuple[int]], Array],
) -> tuple[Array, Array, Array]:
    """Draws N targets from the posterior of each position and, for each target, its own time and noise.

    Args:
        posterior: of the target chunks, [P, Z].
        num_samples: N.
        key_P: one key per position.
        draw_times: `(key, (N,)) -> [N]`.

    Returns:
        Targets [P, N, Z], times [P, N] and standard normal noise [P, N, Z].
    """
    shape = (num_samples, posterior.mean.shape[-1])

    def draw(key: Array) -> tuple[Array, Array, Array]:
        eps_key, time_key, noise_key = jax.random.split(key, 3)
        return (
            jax.random.normal(eps_key, shape),
            draw_times(time_key, shape[:1]),
            jax.random.normal(noise_key, shape),
        )

    eps_PNZ, time_PN, noise_PNZ = jax.vmap(draw)(key_P)
    return posterior.mean[:, None] + posterior.std[:, None] * eps_PNZ, time_PN, noise_PNZ


def _modulate(x: Array, shift: Array, scale: Array) -> Array:
    return x * (1 + scale) + shift


class ModulatedBlock(nn.Module):
    """`x + gate * MLP(LN(x) (1 + scale) + shift)`, where shift, scale and gate are linear in the condition."""

    norm_epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_PND: Array, active: Array) -> tuple[Array, None]:
        width, dtype = x_PND.shape[-1], self.dtype
        modulation = linear(3 * width, dtype, "modulation", kernel_init=nn.initializers.zeros)
        shift, scale, gate = jnp.split(modulation(active), 3, axis=-1)
        a_PND = _modulate(layer_norm(self.norm_epsilon, dtype, "norm")(x_PND), shift, scale)
        a_PND = silu(linear(width, dtype, "up", kernel_init=_xavier)(a_PND))
        down = linear(width, dtype, "down", kernel_init=_xavier)
        return constrain(x_PND + gate * down(a_PND)), None


class AdaLNMLP(nn.Module):
    """A function of noisy states at integer times and of hidden states; zero everywhere at initialisation."""

    num_blocks: int
    hidden_size: int
    output_size: int
    norm_epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_PNZ: Array, time: Array, h_PD: Array) -> Array:
        """Evaluates the network.

        Args:
            x_PNZ: the states.
            time: integers from 0 to 999, [P, N]; an axis of size 1 means the same time along it, and the modulation
                is then computed once and not for every draw.
            h_PD: the hidden states.

        Returns:
            float32 [P, N, output_size].
        """
        width, dtype = self.hidden_size, self.dtype
        with jax.named_scope("head"):
            x_PNZ, h_PD = constrain((x_PNZ, h_PD))
            features = time_features(time).astype(dtype)
            t = silu(linear(width, dtype, "time_hidden", kernel_init=normal_init)(features))
            t = linear(width, dtype, "time", kernel_init=normal_init)(t)
            condition_PD = linear(width, dtype, "condition", kernel_init=_xavier)(h_PD)
            active = silu(t + condition_PD[:, None])
            x_PND = linear(width, dtype, "input", kernel_init=_xavier)(x_PNZ.astype(dtype))
            blocks = stack(
                self,
                keeping_products(ModulatedBlock, self.num_blocks),
                (self.norm_epsilon, dtype),
                "blocks",
                self.num_blocks,
                (nn.broadcast,),
            )
            x_PND, _ = blocks(x_PND, active)
            zeros = nn.initializers.zeros
            modulation = linear(2 * width, dtype, "modulation", kernel_init=zeros)(active)
            shift, scale = jnp.split(modulation, 2, axis=-1)
            normed_PND = layer_norm(self.norm_epsilon, dtype, "norm", affine=False)(x_PND)
            output = linear_in_float32(self.output_size, dtype, "output", kernel_init=zeros)
            return output(_modulate(normed_PND, shift, scale))


def over_steps(
    head: nn.Module,
    step: Callable[[Any, Array, Array], tuple[Array, None]],
    state_PNZ: Array,
    steps: Array,
) -> Array:
    """The state after a sampler's steps, [P, N, Z]: `step(head, state, one) -> (state, None)` for each of `steps`, [steps, ...]."""
    scan = nn.scan(
        step,
        variable_broadcast="params",
        split_rngs={"params": False},
        # The check traces the step once more; at initialisation this trace draws the parameters, which all steps share.
        check_constancy_invariants=head.is_initializing(),
    )
    state_PNZ, _ = scan(head, state_PNZ, steps)
    return state_PNZ
