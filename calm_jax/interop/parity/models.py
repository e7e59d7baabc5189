"""Models of this project with the parameters of published checkpoints."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax import brier
from calm_jax.interop import names, published
from calm_jax.interop.weights import Weights
from calm_jax.losses import Posterior
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.models.heads import LATENT_HEADS
from calm_jax.models.heads.softmax import SoftmaxHead
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.tasks import AutoencoderTask, AutoregressiveTask, CalmTask, LmTask, Params


def _read(rows: list[names.Row], folder: pathlib.Path, task: AutoencoderTask | LmTask) -> Params:
    like = jax.eval_shape(task.init, jax.random.key(0))
    return names.read_parameters(rows, Weights(folder), like)


class PublishedAutoencoder:
    """A published autoencoder.

    Attributes:
      model: the float32 module.
      variables: `{"params": ...}`, its parameters.
      rows: table from the parameters to published names.
    """

    def __init__(self, folder: pathlib.Path):
        config = published.PublishedConfig(folder)
        self.rows = names.autoencoder_rows(config.autoencoder())
        self.model = Autoencoder(
            config.autoencoder(), config["vocab_size"], config["patch_size"], jnp.float32
        )
        task = AutoencoderTask(self.model, config["pad_token_id"], random_chunks=0.0)
        self.variables = {"params": _read(self.rows, folder, task)}

    def apply(self, params: Params, *arguments: Any, method: str) -> Any:
        """Calls a method of the module."""
        return self.model.apply({"params": params}, *arguments, method=method)


class _PublishedLm:
    """A published language model.

    Attributes:
      params: the parameters.
      frozen: variables of the autoencoder; empty without one.
      rows: table from the parameters to published names.
      eos_id: the token that ends a text.
    """

    task: LmTask
    params: Params
    frozen: Params
    rows: list[names.Row]
    eos_id: int

    def bind(self) -> ChunkModel:
        """The model as the samplers see it."""
        return self.task.bind(self.params, self.frozen)

    def chunks(self, ids: np.ndarray) -> jax.Array:
        """Token ids [B, T] as chunks [B, L, K]."""
        return jnp.asarray(ids.reshape(len(ids), -1, self.task.chunk_size), jnp.int32)

    def head(self, params: Params, *arguments: Any, method: str | None = None) -> Any:
        """Calls a method of the head alone; `params` are those of the whole model."""
        variables = {"params": params["head"]}
        return self.task.model.head.apply(variables, *arguments, method=method)


class PublishedLlama(_PublishedLm):
    """A published autoregressive baseline, in float32."""

    task: AutoregressiveTask

    def __init__(self, folder: pathlib.Path):
        config = published.PublishedConfig(folder)
        config.refuse_unsupported()
        body, vocab_size = config.transformer(), config["vocab_size"]
        head = SoftmaxHead(vocab_size, body.hidden_size, jnp.float32)
        model = AutoregressiveLM(body, head, vocab_size, jnp.float32)
        protocol = brier.Protocol(num_samples=2)
        self.task = AutoregressiveTask(model, config["pad_token_id"], protocol)
        self.rows = names.autoregressive_rows(body, config.is_tied)
        self.eos_id = config["eos_token_id"]
        self.params, self.frozen = _read(self.rows, folder, self.task), {}


class PublishedCalm(_PublishedLm):
    """A published CALM model, in float32, with the autoencoder that `ae_path` names, relative to the golden set."""

    task: CalmTask

    def __init__(self, folder: pathlib.Path):
        config = published.PublishedConfig(folder)
        config.refuse_unsupported()
        body, head_config = config.transformer(), config.head()
        vocab_size, pad_id = config["vocab_size"], config["pad_token_id"]
        autoencoder = PublishedAutoencoder(folder.parent / config["ae_path"])
        make_head, _ = LATENT_HEADS[head_config.name]
        sizes = (body.hidden_size, autoencoder.model.config.latent_size, body.norm_epsilon)
        head = make_head(head_config, *sizes, jnp.float32)
        model = CALM(body, head, None, vocab_size, pad_id, jnp.float32)
        # The published code leaves out the last valid start of an n-gram.
        protocol = brier.Protocol(num_samples=2, skip_last_start=True)
        self.task = CalmTask(model, autoencoder.model, protocol, token_prior_weight=0.0)
        self.rows = names.calm_rows(body, head_config)
        self.eos_id = config["eos_token_id"]
        self.params, self.frozen = _read(self.rows, folder, self.task), autoencoder.variables

    def predicting(self, params: Params, ids: np.ndarray) -> jax.Array:
        """The hidden states that predict each chunk but the first, [P, D]."""
        h_BLD = self.task.hidden(params, self.chunks(ids))
        return h_BLD.reshape(-1, h_BLD.shape[-1])

    def posterior(self, ids: np.ndarray) -> Posterior:
        """The autoencoder's posterior of each chunk but the first, [P, Z]."""
        tokens_BLK = self.chunks(ids)
        return self.task.posterior(self.frozen, tokens_BLK[:, 1:].reshape(-1, tokens_BLK.shape[2]))
