"""Generative heads: hidden state in, next chunk out. `HEADS` is the list of them.

A latent head is a Flax module with
  `loss(h_PD, posterior, key_P)` -> [P], the loss of each position against the autoencoder's posterior, and
  `sample(h_PD, num_draws, key_P)` -> [P, N, Z], draws of the next chunk's latent.
Random numbers of a position come from its own key, so that splitting positions over devices,
processes or microbatches changes nothing.
"""

from calm_jax.heads.energy import EnergyHead, EnergyHeadConfig

HEADS = {"energy": (EnergyHead, EnergyHeadConfig)}
