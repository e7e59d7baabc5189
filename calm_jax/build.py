"""Builds models and tasks from a config."""

import jax.numpy as jnp
import optax

from calm_jax.config import Config
from calm_jax.data.tokenizers import Tokenizer, Vocabulary
from calm_jax.models import attention
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM, TokenPredictor
from calm_jax.models.heads import LATENT_HEADS
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.tasks import AutoencoderTask, AutoregressiveTask, CalmTask, LmTask, Task
from calm_jax.training.optimizer import make_optimizer


def make_autoencoder_task(config: Config, tokenizer: Tokenizer | Vocabulary) -> AutoencoderTask:
    """The task of stage 1, training the autoencoder. Of the tokenizer, only its vocabulary is used."""
    model = Autoencoder(
        config.autoencoder.model,
        tokenizer.vocab_size,
        config.chunk_size,
        jnp.dtype(config.compute_dtype),
    )
    return AutoencoderTask(model, tokenizer.pad_id, config.autoencoder.random_chunks)


def make_lm_task(config: Config, tokenizer: Tokenizer | Vocabulary) -> LmTask:
    """The task of stage 2, training the language model; its BrierLM has the published protocol. Of the tokenizer, only its
    vocabulary is used.

    Returns:
      CALM with the config's latent head, or the autoregressive baseline if the head is "softmax".
    """
    dtype, body, protocol = jnp.dtype(config.compute_dtype), config.lm.model, config.eval.published
    if not config.has_autoencoder:
        softmax = SoftmaxHead(tokenizer.vocab_size, body.hidden_size, dtype)
        baseline = AutoregressiveLM(body, softmax, tokenizer.vocab_size, dtype)
        return AutoregressiveTask(baseline, tokenizer.pad_id, protocol)
    # The frozen autoencoder computes in float32, because its latents are the targets of the loss.
    autoencoder = Autoencoder(
        config.autoencoder.model, tokenizer.vocab_size, config.chunk_size, jnp.float32
    )
    make_head, _ = LATENT_HEADS[config.lm.head.name]
    head = make_head(
        config.lm.head,
        body.hidden_size,
        config.autoencoder.model.latent_size,
        body.norm_epsilon,
        dtype,
    )
    weight = config.lm.token_loss_weight
    token_predictor = (
        TokenPredictor(
            weight,
            tokenizer.vocab_size,
            config.chunk_size,
            body.hidden_size,
            body.norm_epsilon,
            dtype,
        )
        if weight
        else None
    )
    model = CALM(body, head, token_predictor, tokenizer.vocab_size, tokenizer.pad_id, dtype)
    return CalmTask(model, autoencoder, protocol, config.lm.token_prior_weight)


def stage_of(
    config: Config, stage: str, tokenizer: Tokenizer | Vocabulary
) -> tuple[Task, Task | None, optax.GradientTransformation]:
    """The stage's task, the task whose parameters are frozen in it (None if there are none), and its optimizer."""
    section = getattr(config, stage)
    optimizer = make_optimizer(section.optimizer, section.training.num_steps)
    autoencoder = make_autoencoder_task(config, tokenizer) if config.has_autoencoder else None
    if autoencoder is not None and stage == "autoencoder":
        return autoencoder, None, optimizer
    return make_lm_task(config, tokenizer), autoencoder, optimizer


def check_attention(config: Config) -> None:
    """Raises `UserError` if the devices of the current mesh (`jax.set_mesh`) cannot run `lm.model.attention` on this model."""
    model, isolated = config.lm.model, config.lm.data.isolate_documents
    attention.check(model.attention, model.head_size, config.compute_dtype, isolated)
