"""Generative heads: a hidden state in, the next chunk out. `HEADS` maps the names of `lm.head.name` to heads and configs.

A latent head (energy, diffusion, flow) is a Flax module with the attributes `config`, `hidden_size`, `latent_size`, `norm_epsilon`
(of the backbone) and `dtype`, in this order. The config's `num_samples` is the number of draws that the loss makes at a position; its
`beta`, if it has one, is the exponent with which metrics compare draws and posteriors (else 1). The head has two methods, whose
parameters have these names:

* `loss(h_PD, posterior, key_P)` -> float32 [P]: the loss at each position against the autoencoder's posterior of the next chunk,
  [P, Z]. The head gets the posterior and not a sample of it, so that each head draws as many targets as it needs.
* `sample(h_PD, num_draws, key_P, noise_scale)` -> float32 [P, N, Z]: draws of the next chunk's latent. A `noise_scale`
  of 1 samples the model; a smaller one scales down the head's noise, and so the variety of its draws.

A head's class attribute `stacks` may list the paths of its layer stacks (`calm_jax.models.stack.stack`) in its parameters;
generation then has each layer's parameters apart.

The softmax head, of the autoregressive baseline, has `loss` and `sample` over tokens, and `log_probs`; it needs no
autoencoder. Each position has its own random key, so that splitting positions over devices, processes or microbatches
changes no draw.
"""

import collections
from typing import Any

from calm_jax.models.heads.diffusion import DiffusionHead, DiffusionHeadConfig
from calm_jax.models.heads.energy import EnergyHead, EnergyHeadConfig
from calm_jax.models.heads.flow import FlowHead, FlowHeadConfig
from calm_jax.models.heads.softmax import SoftmaxHead, SoftmaxHeadConfig

LATENT_HEADS: dict[str, tuple[Any, Any]] = {
    "energy": (EnergyHead, EnergyHeadConfig),
    "diffusion": (DiffusionHead, DiffusionHeadConfig),
    "flow": (FlowHead, FlowHeadConfig),
}
# A ChainMap is a view, not a copy: it contains heads that are added to `LATENT_HEADS` later, too.
HEADS = collections.ChainMap({"softmax": (SoftmaxHead, SoftmaxHeadConfig)}, LATENT_HEADS)
HeadConfig = EnergyHeadConfig | DiffusionHeadConfig | FlowHeadConfig | SoftmaxHeadConfig
