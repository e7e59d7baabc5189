"""Floating-point operations (FLOPs) of training and generation, by part of the model, from a recipe's sizes.

The product of an [m, k] and a [k, n] matrix counts 2 m k n. `Count` has the two ways to count. Both leave out norms,
activations, the softmax's exponentials and the optimizer, whose time is that of reading memory.
"""

import enum
import itertools
import math

from calm_jax.config import Config
from calm_jax.models import vocabulary
from calm_jax.models.autoencoder import AutoencoderConfig
from calm_jax.models.heads.diffusion import DiffusionHeadConfig
from calm_jax.models.heads.energy import EnergyHeadConfig
from calm_jax.models.heads.flow import FlowHeadConfig
from calm_jax.models.transformer import TransformerConfig

# The number of positions that each position attends to in `Count.PAPER`, whatever the block size.
PAPER_CONTEXT = 2048


class Count(enum.Enum):
    """The two ways to count FLOPs.

    Attributes:
      PAPER: as in the paper's table: attention as if it were not causal, training as three forward passes through every
        part, the frozen encoder included; generation at temperature 1.
      OURS: what this code computes: attention over the positions that each one sees, one computation of what the energy
        head's draws share, a single forward pass of the frozen encoder, the energy score, and for temperatures below 1
        every candidate and its decoding.
    """

    PAPER = "paper"
    OURS = "ours"


# FLOPs by part of the model.
Flops = dict[str, float]


def _linear(*sizes: int) -> float:
    """A chain of linear layers of these widths, for one position."""
    return sum(2.0 * a * b for a, b in itertools.pairwise(sizes))


def _swiglu(width: int, inner: int) -> float:
    return 3 * _linear(width, inner)


def backbone(model: TransformerConfig, seen: float) -> float:
    """The transformer's layers, for one position that attends to `seen` positions, itself included."""
    D, A = model.hidden_size, model.head_size
    heads, kv_heads = model.num_heads * A, model.num_kv_heads * A
    projections = 2 * _linear(D, heads) + 2 * _linear(D, kv_heads)
    attention = 2 * 2.0 * seen * heads
    return model.num_layers * (projections + attention + _swiglu(D, model.intermediate_size))


def chunk_embedding(width: int, chunk_size: int) -> float:
    """The MLP from K concatenated token embeddings to one input of the backbone, for one chunk."""
    return _linear(chunk_size * width, 2 * width, width)


def encoder(model: AutoencoderConfig, chunk_size: int) -> float:
    """The autoencoder's encoder, for one chunk."""
    D, half = model.hidden_size, model.num_encoder_layers // 2
    layers = half * (chunk_size + 1) * _swiglu(D, model.intermediate_size)
    return layers + _linear(chunk_size * D, D) + _linear(D, 2 * model.latent_size)


def decoder(model: AutoencoderConfig, chunk_size: int, vocab_size: int) -> float:
    """The autoencoder's decoder, for one chunk; nearly all of it is the product that gives the logits."""
    D, half = model.hidden_size, model.num_decoder_layers // 2
    layers = half * (chunk_size + 1) * _swiglu(D, model.intermediate_size)
    logits = chunk_size * _linear(D, vocab_size)
    return layers + _linear(model.latent_size, D) + _linear(D, chunk_size * D) + logits


def _energy_draws(head: EnergyHeadConfig, D: int, Z: int, draws: float, shares: bool) -> float:
    """FLOPs of `draws` draws for one hidden state; with `shares`, the part that they have in common is computed once."""
    # This part depends on the hidden state alone: its projection, and half of each block's first layer.
    once = _linear(D, D) + head.num_blocks * _linear(D, D)
    block = _linear(D, D) + _linear(D, D) + _linear(D, 2 * D) + _linear(D, D)
    each = _linear(head.noise_size, D) + head.num_blocks * block + _linear(D, D, Z)
    return (1 if shares else draws) * once + draws * each


def _adaln(
    num_blocks: int, D: int, size_in: int, size_out: int, draws: float, times: float
) -> float:
    """The network of the diffusion and the flow head, for `draws` inputs at `times` different times."""
    steering = _linear(256, D, D) + num_blocks * _linear(D, 3 * D) + _linear(D, 2 * D)
    each = _linear(size_in, D) + num_blocks * _linear(D, D, D) + _linear(D, size_out)
    return _linear(D, D) + times * steering + draws * each


def head_evaluations(config: Config) -> int:
    """How often in a row the head's network is evaluated for the draws of one chunk in generation."""
    head = config.lm.head
    if isinstance(head, FlowHeadConfig):
        return head.num_steps * (2 if head.solver == "midpoint" else 1)
    return head.num_steps if isinstance(head, DiffusionHeadConfig) else 1


def head_draws(config: Config, draws: float, count: Count) -> float:
    """Drawing `draws` latents of one chunk in generation; NaN for a head that was added from outside."""
    head, D, Z = config.lm.head, config.lm.model.hidden_size, config.autoencoder.model.latent_size
    if isinstance(head, EnergyHeadConfig):
        return _energy_draws(head, D, Z, draws, shares=count is Count.OURS)
    if not isinstance(head, DiffusionHeadConfig | FlowHeadConfig):
        return math.nan
    out = 2 * Z if isinstance(head, DiffusionHeadConfig) else Z
    return head_evaluations(config) * _adaln(head.num_blocks, D, Z, out, draws, 1)


def _head_loss(config: Config, count: Count) -> float:
    """The head's forward pass in the loss of one chunk; NaN for a head that was added from outside."""
    head, D, Z = config.lm.head, config.lm.model.hidden_size, config.autoencoder.model.latent_size
    if isinstance(head, EnergyHeadConfig):
        return _energy_draws(head, D, Z, head.num_samples, shares=count is Count.OURS)
    if not isinstance(head, DiffusionHeadConfig | FlowHeadConfig):
        return math.nan
    out = 2 * Z if isinstance(head, DiffusionHeadConfig) else Z
    return _adaln(head.num_blocks, D, Z, out, head.num_samples, head.num_samples)


def _energy_score(config: Config) -> float:
    """The energy score's distances between draws and to targets, for one chunk: three operations for each component."""
    head, Z = config.lm.head, config.autoencoder.model.latent_size
    if not isinstance(head, EnergyHeadConfig):
        return 0.0
    return 3.0 * Z * head.num_samples * (head.num_samples + head.num_targets)


def _token_predictor(config: Config) -> float:
    """The token predictor's features of one chunk, from which its logits are computed."""
    D, K = config.lm.model.hidden_size, config.chunk_size
    return _linear(D, 2 * D, K * D)


def _token_logits(config: Config, vocab_size: int) -> float:
    """The token predictor's logits of one chunk's K tokens."""
    return config.chunk_size * _linear(config.lm.model.hidden_size, vocab_size)


def _seen(positions: int, count: Count) -> float:
    """How many of `positions` positions each position attends to, on average."""
    return PAPER_CONTEXT if count is Count.PAPER else (positions + 1) / 2


def autoencoder_training(config: Config, vocab_size: int) -> Flops:
    """Training of stage 1, per token; both ways count the same."""
    model, K = config.autoencoder.model, config.chunk_size
    return {
        "encoder": 3 * encoder(model, K) / K,
        "decoder": 3 * decoder(model, K, vocab_size) / K,
    }


def lm_training(config: Config, vocab_size: int, count: Count) -> Flops:
    """Training of stage 2, per token of text. OURS does not count a block's last chunk, which the
    backbone reads, but from which nothing is predicted."""
    K, D = config.chunk_size, config.lm.model.hidden_size
    num_chunks = config.lm.data.block_tokens // K
    # Chunks from which the next one is predicted, per token.
    share = (num_chunks - 1) / num_chunks / K if count is Count.OURS else 1 / K
    flops = {"backbone": 3 * backbone(config.lm.model, _seen(num_chunks - 1, count))}
    if not config.has_autoencoder:
        flops["vocabulary"] = 3 * _linear(D, vocab_size)
    else:
        flops["backbone"] += 3 * chunk_embedding(D, K)
        flops["head"] = 3 * _head_loss(config, count)
        if config.lm.token_loss_weight:
            logits = _token_logits(config, vocab_size)
            flops["token predictor"] = 3 * (_token_predictor(config) + logits)
        # The encoder is frozen: OURS has no backward pass through it.
        flops["encoder"] = (3 if count is Count.PAPER else 1) * encoder(config.autoencoder.model, K)
        if count is Count.OURS:
            flops["energy score"] = 3 * _energy_score(config)
    return {name: share * part for name, part in flops.items()}


def training(config: Config, stage: str, vocab_size: int) -> float:
    """Training of `stage`, "autoencoder" or "lm", per token of its text, counted as OURS."""
    if stage == "autoencoder":
        return sum(autoencoder_training(config, vocab_size).values())
    return sum(lm_training(config, vocab_size, Count.OURS).values())


def recomputed(config: Config, stage: str, vocab_size: int, num_shards: int) -> float:
    """FLOPs per token that the backward pass of `stage` spends on recomputing activations.

    The logits of a device's microbatch are recomputed if they are too large to be held at once on an accelerator
    (`calm_jax.models.vocabulary`). On a CPU that takes no longer, and is not counted. `num_shards` is the number of devices
    that the rows are split over. A part's forward pass is counted as a third of its FLOPs in training.
    Not counted is what the attention "xla" and "cudnn" computes again with `lm.model.remat="dots"`.
    """
    section = getattr(config, stage)
    tokens = section.training.batch_size * section.data.block_tokens
    positions = max(1, tokens // (section.training.accumulation_steps * num_shards))
    in_blocks = vocabulary.block_size(positions, vocab_size, on_cpu=False) < vocab_size
    if stage == "autoencoder":
        return _linear(config.autoencoder.model.hidden_size, vocab_size) if in_blocks else 0.0
    again = 0.0
    if config.lm.model.remat == "full":
        again += lm_training(config, vocab_size, Count.OURS)["backbone"] / 3
    if in_blocks and (not config.has_autoencoder or config.lm.token_loss_weight):
        again += _linear(config.lm.model.hidden_size, vocab_size)
    return again


def inference(
    config: Config, vocab_size: int, count: Count, context: int, draws: float, decoded: float
) -> Flops:
    """Generation, per generated token.

    Args:
      config: the recipe.
      vocab_size: number of token ids, with the pad token.
      count: how to count.
      context: tokens before the generated one; PAPER takes 2048 chunks instead.
      draws: latents drawn for each chunk, 1 at temperature 1.
      decoded: latents decoded to tokens for each chunk; fewer than `draws` where equal draws are decoded once.
    """
    K, D = config.chunk_size, config.lm.model.hidden_size
    seen = PAPER_CONTEXT if count is Count.PAPER else context / K
    flops = {"backbone": backbone(config.lm.model, seen) / K}
    if not config.has_autoencoder:
        return flops | {"vocabulary": _linear(D, vocab_size)}
    flops["backbone"] += chunk_embedding(D, K) / K
    flops["head"] = head_draws(config, draws, count) / K
    flops["decoder"] = decoded * decoder(config.autoencoder.model, K, vocab_size) / K
    if config.lm.token_prior_weight:
        # Once for all draws of a chunk; samplers that decode a chunk's tokens one after the other compute some of it again.
        prior = _token_predictor(config) + _token_logits(config, vocab_size)
        flops["token predictor"] = prior / K
    return flops
