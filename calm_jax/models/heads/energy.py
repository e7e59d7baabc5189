"""The energy head: one forward pass turns a hidden state and noise into a latent (paper, section 3).

The head has no likelihood. The energy score, a strictly proper scoring rule that needs only samples, trains it
(`calm_jax.losses.energy_score`).

P positions, N draws at each, D hidden features, E noise features, Z latent features, M target draws.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from absl import logging
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError, require_at_least
from calm_jax.losses import Posterior, energy_score
from calm_jax.models.layers import (
    gated_halves,
    layer_norm,
    linear,
    linear_in_float32,
    normal_init,
    silu,
)
from calm_jax.models.stack import Stacks, keeping_products, stack
from calm_jax.parallel.constraints import constrain, gathered_kernel
from calm_jax.parallel.products import matrix_product


@dataclasses.dataclass(frozen=True)
class EnergyHeadConfig:
    """`config.lm.head` of an energy head; every key is described in `configs/common.py`."""

    name: str
    num_blocks: int
    noise_size: int
    num_samples: int
    num_target_samples: int
    beta: float

    def __post_init__(self):
        if self.num_samples < 2:
            raise UserError(
                f"lm.head.num_samples={self.num_samples} must be at least 2: the energy score compares pairs of draws"
            )
        if not 0 < self.beta <= 2:
            raise UserError(f"lm.head.beta={self.beta} must be in (0, 2]; the paper uses 1")
        if self.beta == 2:
            logging.warning(
                "lm.head.beta=2 makes the energy score not strictly proper: it trains the mean of the head's draws, not their spread"
            )
        require_at_least(0, self, "lm.head.", "num_target_samples")
        require_at_least(1, self, "lm.head.", "num_blocks", "noise_size")

    @property
    def num_targets(self) -> int:
        """M, the number of latents at each position that draws are scored against: draws of the posterior, or its mean."""
        return max(1, self.num_target_samples)


class NoiseBlock(nn.Module):
    """One residual block, which refines the draws [P, N, D] given the condition [P, D].

    The first linear layer acts on the concatenation of a draw and the condition. Its product with the condition is
    the same for all draws of a position, and is computed once per position. The None in the result is the output per layer
    that `nn.scan` expects.
    """

    norm_epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x_PND: Array, condition_PD: Array) -> tuple[Array, None]:
        width = x_PND.shape[-1]
        kernel = self.param("input_kernel", normal_init, (2 * width, width)).astype(self.dtype)
        bias = self.param("input_bias", nn.initializers.zeros, (width,))
        normed_PND = layer_norm(self.norm_epsilon, self.dtype, "norm")(x_PND)
        kernel = gathered_kernel(kernel)
        # In float32, so that the bias's gradient, a sum over positions, is summed in float32 on every device.
        once_PD = matrix_product(condition_PD, kernel[width:]).astype(jnp.float32) + bias
        once_PD = once_PD.astype(self.dtype)
        a_PND = nn.silu(matrix_product(normed_PND, kernel[:width]) + once_PD[:, None])
        a_PND = nn.silu(linear(width, self.dtype, "hidden")(a_PND))
        a_PND = gated_halves(linear(2 * width, self.dtype, "gate_up")(a_PND))
        return constrain(x_PND + linear(width, self.dtype, "down")(a_PND)), None


class EnergyHead(nn.Module):
    """Hidden states [P, D] and noise [P, N, E] -> latents, float32 [P, N, Z].

    The last linear layer is zero at initialisation, so a fresh head returns zeros.

    Attributes:
        config: `config.lm.head`.
        hidden_size: D, of the head and of the backbone's hidden states.
        latent_size: Z, the autoencoder's.
        norm_epsilon: of every LayerNorm.
        dtype: of the arithmetic; parameters are float32.
    """

    config: EnergyHeadConfig
    hidden_size: int
    latent_size: int
    norm_epsilon: float
    dtype: DTypeLike
    stacks: ClassVar[Stacks] = (("blocks",),)

    @nn.compact
    def __call__(self, h_PD: Array, noise_PNE: Array) -> Array:
        width, epsilon, dtype = self.hidden_size, self.norm_epsilon, self.dtype
        with jax.named_scope("head"):
            h_PD, noise_PNE = constrain((h_PD, noise_PNE.astype(dtype)))
            x_PND = layer_norm(epsilon, dtype, "noise_norm")(
                linear(width, dtype, "noise")(noise_PNE)
            )
            condition_PD = layer_norm(epsilon, dtype, "hidden_norm")(
                linear(width, dtype, "hidden")(h_PD)
            )
            blocks = stack(
                self,
                keeping_products(NoiseBlock, self.config.num_blocks),
                (epsilon, dtype),
                "blocks",
                self.config.num_blocks,
                (nn.broadcast,),
            )
            x_PND, _ = blocks(x_PND, condition_PD)
            x_PND = layer_norm(epsilon, dtype, "output_norm")(x_PND)
            x_PND = silu(linear(width, dtype, "output_hidden")(x_PND))
            zeros = nn.initializers.zeros
            return linear_in_float32(self.latent_size, dtype, "output", kernel_init=zeros)(x_PND)

    def draw_noise(self, num_draws: int, key_P: Array) -> Array:
        """Noise, uniform in [-0.5, 0.5), float32 [P, N, E]."""
        shape = (num_draws, self.config.noise_size)
        return jax.vmap(lambda key: jax.random.uniform(key, shape, minval=-0.5, maxval=0.5))(key_P)

    def sample(self, h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        """Draws of the next chunk's latent, float32 [P, N, Z]; `noise_scale` multiplies the noise (1 in training)."""
        return self(h_PD, noise_scale * self.draw_noise(num_draws, key_P))

    def loss(self, h_PD: Array, posterior: Posterior, key_P: Array) -> Array:
        """The loss at each position, float32 [P]: minus the energy score of N draws of the head against M of the
        posterior, or its mean."""
        key_P, target_key_P = jax.vmap(jax.random.split, out_axes=1)(key_P)
        noise_PNE = self.draw_noise(self.config.num_samples, key_P)
        shape = (self.config.num_targets, self.latent_size)
        if self.config.num_target_samples:
            eps_PMZ = jax.vmap(lambda key: jax.random.normal(key, shape))(target_key_P)
        else:
            eps_PMZ = jnp.zeros((len(h_PD), *shape))
        return -energy_score(self(h_PD, noise_PNE), posterior, eps_PMZ, self.config.beta)
