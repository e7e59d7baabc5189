"""Published checkpoints as models of this project, their parameters read."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax import brier
from calm_jax.heads import LATENT_HEADS
from calm_jax.heads.softmax import SoftmaxHead
from calm_jax.interop import names, published
from calm_jax.interop.weights import Weights
from calm_jax.models.autoencoder import Autoencoder
from calm_jax.models.autoregressive import AutoregressiveLM
from calm_jax.models.calm import CALM
from calm_jax.sampling import ChunkModel
from calm_jax.tasks import ArTask, AutoencoderTask, CalmTask, LmTask


def _read(rows: list[names.Row], folder: pathlib.Path, task: AutoencoderTask | LmTask) -> dict:
    like = jax.eval_shape(task.init, jax.random.key(0))
    return names.read_parameters(rows, Weights(folder), like)


class PublishedAutoencoder:
    """An autoencoder's model, its variables, and the table of their names."""

    def __init__(self, folder: pathlib.Path):
        config = published.PublishedConfig(folder)
        self.rows = names.autoencoder_rows(config.autoencoder())
        self.model = Autoencoder(
            config.autoencoder(), config["vocab_size"], config["patch_size"], jnp.float32
        )
        task = AutoencoderTask(self.model, config["pad_token_id"])
        self.variables = {"params": _read(self.rows, folder, task)}


class PublishedLm:
    """A language model's task, parameters and table of names; CALM's with the autoencoder that it names."""

    task: LmTask

    def __init__(self, folder: pathlib.Path):
        config = published.PublishedConfig(folder)
        config.refuse_what_is_not_computed()
        body, protocol = config.transformer(), brier.Protocol(num_samples=2, skip_last_start=True)
        vocab_size, pad_id = config["vocab_size"], config["pad_token_id"]
        if config.architecture == published.AUTOREGRESSIVE:
            self.frozen = {}
            self.rows = names.autoregressive_rows(body, config.is_tied)
            head = SoftmaxHead(vocab_size, body.hidden_size, jnp.float32)
            model = AutoregressiveLM(body, head, vocab_size, jnp.float32)
            self.task = ArTask(model, pad_id, brier.Protocol(num_samples=2))
        else:
            autoencoder = PublishedAutoencoder(folder.parent / config["ae_path"])
            self.frozen, latent_size = autoencoder.variables, autoencoder.model.config.latent_size
            head_config = config.head()
            make_head, _ = LATENT_HEADS[head_config.name]
            sizes = (body.hidden_size, latent_size, body.norm_epsilon)
            head = make_head(head_config, *sizes, jnp.float32)
            model = CALM(body, head, vocab_size, pad_id, jnp.float32)
            self.task = CalmTask(model, autoencoder.model, protocol)
            self.rows = names.calm_rows(body, head_config)
        self.params = _read(self.rows, folder, self.task)

    def bind(self) -> ChunkModel:
        return self.task.bind(self.params, self.frozen)

    def chunks(self, ids: np.ndarray) -> jax.Array:
        return jnp.asarray(ids.reshape(len(ids), -1, self.task.chunk_size), jnp.int32)

    def head(self, params: dict, *arguments, method: str | None = None):
        """Applies the head alone."""
        variables = {"params": params["head"]}
        return self.task.model.head.apply(variables, *arguments, method=method)

    def predicting(self, params: dict, ids: np.ndarray) -> jax.Array:
        """The hidden states that predict each chunk but the first, [P, D]."""
        h_BLD = self.task.hidden(params, self.chunks(ids))
        return h_BLD.reshape(-1, h_BLD.shape[-1])

    def posterior(self, ids: np.ndarray):
        """The autoencoder's posterior of each chunk but the first."""
        tokens_BLK = self.chunks(ids)
        return self.task.posterior(self.frozen, tokens_BLK[:, 1:].reshape(-1, tokens_BLK.shape[2]))
