"""The flow-matching head: a learned velocity field moves noise to a latent in a few steps (paper, section 3 and its ablation).

The path from noise to a target is a straight line, whose velocity is `target - noise`.

P positions, N draws or targets of each, Z latent size.
"""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from calm_jax.errors import UserError, require_at_least, require_one_of
from calm_jax.losses import Posterior
from calm_jax.models.heads.adaln import AdaLNMLP, over_steps, training_draws
from calm_jax.models.stack import Stacks

SOLVERS = ("midpoint", "euler")
# The network's time input is in whole thousandths.
_TIME_UNITS = 1000


@dataclasses.dataclass(frozen=True)
class FlowHeadConfig:
    """`config.lm.head` of a flow-matching head; every key is described in `configs/common.py`."""

    name: str
    num_blocks: int
    num_samples: int
    num_steps: int
    solver: str

    def __post_init__(self):
        require_at_least(1, self, "lm.head.", "num_blocks", "num_samples")
        if not 1 <= self.num_steps <= _TIME_UNITS:
            raise UserError(
                f"lm.head.num_steps={self.num_steps} must be from 1 to {_TIME_UNITS}, the number of values of time that the network distinguishes"
            )
        require_one_of("lm.head.solver", self.solver, SOLVERS)


class FlowHead(nn.Module):
    """A latent head by flow matching; see `calm_jax.models.heads`. Time 0 is noise, time 1 the latent.

    Attributes:
        config: `config.lm.head`.
        hidden_size: D, of the head's network and of the hidden states.
        latent_size: Z.
        norm_epsilon: of every LayerNorm.
        dtype: of the arithmetic; parameters, losses and draws are float32.
    """

    config: FlowHeadConfig
    hidden_size: int
    latent_size: int
    norm_epsilon: float
    dtype: DTypeLike
    stacks: ClassVar[Stacks] = (("net", "blocks"),)

    def setup(self):
        self.net = AdaLNMLP(
            self.config.num_blocks,
            self.hidden_size,
            self.latent_size,
            self.norm_epsilon,
            self.dtype,
        )

    def velocity(self, state_PNZ: Array, time: Array, h_PD: Array) -> Array:
        """The velocity [P, N, Z] at integer times in thousandths; `AdaLNMLP` says which shapes they may have."""
        return self.net(state_PNZ, time, h_PD)

    def loss(self, h_PD: Array, posterior: Posterior, key_P: Array) -> Array:
        """The loss at each position, float32 [P]: the mean over N targets, each with its own time and noise."""
        draws = training_draws(posterior, self.config.num_samples, key_P, jax.random.uniform)
        return self.loss_of_draws(h_PD, *draws)

    def loss_of_draws(
        self, h_PD: Array, target_PNZ: Array, time_PN: Array, noise_PNZ: Array
    ) -> Array:
        """`loss`, the squared error of the velocity, for given targets, times in [0, 1) and noise."""
        time_PN1 = time_PN[..., None]
        state_PNZ = (1 - time_PN1) * noise_PNZ + time_PN1 * target_PNZ
        velocity_PNZ = self.net(state_PNZ, jnp.floor(_TIME_UNITS * time_PN), h_PD)
        return ((velocity_PNZ - (target_PNZ - noise_PNZ)) ** 2).mean((-2, -1))

    def sample(self, h_PD: Array, num_draws: int, key_P: Array, noise_scale: float) -> Array:
        """Draws of the next chunk's latent, float32 [P, N, Z]; `noise_scale` multiplies the initial state."""
        shape = (num_draws, self.latent_size)
        noise_PNZ = jax.vmap(lambda key: jax.random.normal(key, shape))(key_P)
        return self.integrate(h_PD, noise_scale * noise_PNZ)

    def integrate(self, h_PD: Array, state_PNZ: Array) -> Array:
        """Integrates the velocity field from time 0 to 1, from given initial states, by the config's solver."""
        midpoint, length = self.config.solver == "midpoint", 1 / self.config.num_steps

        def forward(head: "FlowHead", state_PNZ: Array, times_2: Array):
            start, middle = times_2[:, None, None]
            velocity_PNZ = head.net(state_PNZ, start, h_PD)
            if midpoint:
                velocity_PNZ = head.net(state_PNZ + length / 2 * velocity_PNZ, middle, h_PD)
            return state_PNZ + length * velocity_PNZ, None

        return over_steps(self, forward, state_PNZ, integer_times(self.config.num_steps))


def integer_times(num_steps: int) -> Array:
    """The start and the middle of each step in whole thousandths, rounded down, int32 [steps, 2].

    Computed from the step's index in integers, as an accumulated float may round down to the thousandth below.
    """
    step = np.arange(num_steps)
    halves = np.stack([2 * step, 2 * step + 1], axis=-1)
    return jnp.asarray((_TIME_UNITS * halves // (2 * num_steps)).astype(np.int32))
