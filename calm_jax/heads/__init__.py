"""Generative heads: hidden state in, next chunk out. `HEADS` is the list of them.

A latent head is a Flax module with
  `loss(h_PD, posterior, key_P)` -> [P], the loss of each position against the autoencoder's posterior, and
  `sample(h_PD, num_draws, key_P, noise_scale)` -> [P, N, Z], draws of the next chunk's latent; a scale
  of 1 is the model, a smaller one shrinks the noise that makes draws differ.
The softmax head has the same two over tokens, without noise to scale, and `log_probs`; it makes another
model of the transformer, without an autoencoder.
Random numbers of a position come from its own key, so that splitting positions over devices,
processes or microbatches changes nothing.
"""

from calm_jax.heads.diffusion import DiffusionHead, DiffusionHeadConfig
from calm_jax.heads.energy import EnergyHead, EnergyHeadConfig
from calm_jax.heads.flow import FlowHead, FlowHeadConfig
from calm_jax.heads.softmax import SoftmaxHead, SoftmaxHeadConfig

LATENT_HEADS = {
    "energy": (EnergyHead, EnergyHeadConfig),
    "diffusion": (DiffusionHead, DiffusionHeadConfig),
    "flow": (FlowHead, FlowHeadConfig),
}
HEADS = LATENT_HEADS | {"softmax": (SoftmaxHead, SoftmaxHeadConfig)}
HeadConfig = EnergyHeadConfig | DiffusionHeadConfig | FlowHeadConfig | SoftmaxHeadConfig
