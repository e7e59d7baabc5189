"""The golden cases that `verify` knows: recorded draws into this implementation, results beside the published ones.

A case is a generator `(checkpoint folder, recorded arrays) -> (quantity, ours, published)`. What the
letters of array names mean, and which draw is which, is in tests/golden/README.md.
"""

import pathlib
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from calm_jax import brier, sampling, temperature
from calm_jax.heads.energy import EnergyHead
from calm_jax.interop import names, published
from calm_jax.losses import cross_entropy, energy_score
from calm_jax.models.autoencoder import Autoencoder, Noise
from calm_jax.models.calm import CALM
from calm_jax.tasks import AutoencoderTask, CalmTask

Arrays = Mapping[str, np.ndarray]
Comparisons = Iterator[tuple[str, np.ndarray, np.ndarray]]


def _gradients(rows: list[names.Row], gradient: dict, golden: Arrays) -> Comparisons:
    tensors = names.write_parameters(rows, gradient)
    for key, value in golden.items():
        if key.startswith("grad/"):
            name = key.removeprefix("grad/")
            yield f"gradient {name}", tensors[name], value


def _autoencoder(folder: pathlib.Path) -> tuple[Autoencoder, dict, list[names.Row]]:
    config = published.PublishedConfig(folder)
    rows = names.autoencoder_rows(config.autoencoder())
    model = Autoencoder(
        config.autoencoder(), config["vocab_size"], config["patch_size"], jnp.float32
    )
    like = jax.eval_shape(AutoencoderTask(model, config["pad_token_id"]).init, jax.random.key(0))
    params = names.read_parameters(rows, published.read_tensors(folder), like)
    return model, {"params": params}, rows


def autoencoder_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Posteriors, logits, evaluation and training losses, gradients."""
    model, variables, rows = _autoencoder(folder)
    tokens_PK = jnp.asarray(golden["input_ids"].reshape(-1, model.chunk_size))
    latent_size = model.config.latent_size

    posterior = model.apply(variables, tokens_PK, method="encode")
    yield "posterior mean", posterior.mean, golden["enc_mean"].reshape(-1, latent_size)
    yield "posterior log std", posterior.log_std, golden["enc_log_std"].reshape(-1, latent_size)

    latents = golden["dec_latents"].reshape(-1, latent_size)
    logits = model.apply(variables, latents, method="decode")
    yield "decoder logits", logits, golden["dec_logits"].reshape(logits.shape)

    latents = posterior.mean + posterior.std * golden["eval_eps"][:, 0]
    logits = model.apply(variables, latents, method="decode")
    yield "evaluation logits", logits, golden["eval_logits"]
    yield "evaluation loss", cross_entropy(logits, tokens_PK).mean(), golden["eval_loss"]
    masked_PK = jnp.asarray(golden["eval_labels_masked"].reshape(tokens_PK.shape))
    masked = cross_entropy(logits, masked_PK).sum() / (masked_PK >= 0).sum()
    yield "masked evaluation loss", masked, golden["eval_loss_masked"]

    noise = Noise(
        keep_token=jnp.asarray(golden["train_token_u"] > model.config.dropout),
        eps=jnp.asarray(golden["train_eps"][:, 0]),
        keep_latent=jnp.asarray(golden["train_dropout_keep"][:, 0] > 0),
    )

    def loss(params: dict) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        ce_PK, kl_P = model.apply({"params": params}, tokens_PK, noise, method="loss")
        total = (ce_PK.sum(-1) + model.config.kl_weight * kl_P).mean()
        return total, (ce_PK.mean(), kl_P.mean())

    (total, (ce, kl)), gradient = jax.value_and_grad(loss, has_aux=True)(variables["params"])
    yield "training cross-entropy", ce, golden["train_ce"]
    yield "training KL", kl, golden["train_kl"]
    yield "training loss", total, golden["train_loss"]
    yield from _gradients(rows, gradient, golden)


class _EnergyModel:
    """An energy model of the golden set, and the autoencoder that its config names."""

    def __init__(self, folder: pathlib.Path, num_target_samples: int):
        config = published.PublishedConfig(folder)
        config.refuse_what_is_not_computed()
        autoencoder, self.frozen, _ = _autoencoder(folder.parent / config["ae_path"])
        transformer = config.transformer()
        head_config = config.energy_head(num_target_samples)
        head = EnergyHead(
            head_config,
            transformer.hidden_size,
            autoencoder.config.latent_size,
            transformer.norm_epsilon,
            jnp.float32,
        )
        self.model = CALM(
            transformer, head, config["vocab_size"], config["pad_token_id"], jnp.float32
        )
        self.task = CalmTask(self.model, autoencoder, num_eval_samples=2)
        self.rows = [
            *names.backbone_rows(transformer),
            *names.energy_head_rows(head_config.num_blocks),
        ]
        like = jax.eval_shape(self.task.init, jax.random.key(0))
        self.params = names.read_parameters(self.rows, published.read_tensors(folder), like)

    def chunks(self, ids: np.ndarray) -> jax.Array:
        return jnp.asarray(ids.reshape(len(ids), -1, self.task.chunk_size), jnp.int32)

    def latents(self, params: dict, h_PD: jax.Array, noise_PNE: jax.Array) -> jax.Array:
        return self.model.apply({"params": params}, h_PD, noise_PNE, method="latents")

    def loss(
        self, params: dict, ids: np.ndarray, labels: np.ndarray, noise_PNE, eps_PMZ
    ) -> jax.Array:
        """The training loss with recorded draws, over the chunks that count."""
        tokens_BLK, labels_BLK = self.chunks(ids), self.chunks(labels)
        h_BLD, _ = self.model.apply({"params": params}, tokens_BLK[:, :-1], method="hidden")
        posterior = self.task.posterior(
            self.frozen, tokens_BLK[:, 1:].reshape(-1, tokens_BLK.shape[2])
        )
        x_PNZ = self.latents(params, h_BLD.reshape(-1, h_BLD.shape[-1]), noise_PNE)
        score_P = energy_score(x_PNZ, posterior, eps_PMZ, self.model.head.config.beta)
        total, weight = self.task.total(-score_P, labels_BLK)
        return total / weight


def energy_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Hidden states, head, energy score, losses, gradients; BrierLM's terms where K >= 4."""
    energy = _EnergyModel(folder, num_target_samples=len(golden["energy_eps"]))
    variables, task = {"params": energy.params}, energy.task
    tokens_BLK = energy.chunks(golden["input_ids"])
    noise_PNE = jnp.asarray(golden["head_rand"].swapaxes(0, 1) - 0.5)
    eps_PMZ = jnp.asarray(golden["energy_eps"].swapaxes(0, 1))

    embedded = energy.model.apply(variables, tokens_BLK[:, :-1], method="embedded")
    yield "input embeddings", embedded, golden["inputs_embeds"]
    h_BLD, _ = energy.model.apply(variables, tokens_BLK[:, :-1], method="hidden")
    yield "hidden states", h_BLD, golden["hidden_states"]
    h_PD = h_BLD.reshape(-1, h_BLD.shape[-1])

    posterior = task.posterior(energy.frozen, tokens_BLK[:, 1:].reshape(-1, task.chunk_size))
    yield "target mean", posterior.mean, golden["ae_mean"]
    yield "target log std", posterior.log_std, golden["ae_log_std"]
    x_PNZ = energy.latents(energy.params, h_PD, noise_PNE)
    yield "head draws", x_PNZ.swapaxes(0, 1), golden["head_out"]
    score_P = energy_score(x_PNZ, posterior, eps_PMZ, float(golden["beta"]))
    yield "energy score", score_P, golden["energy_score"]
    yield "evaluation loss", -score_P.mean(), golden["eval_loss"]

    decode = task.bind(energy.params, energy.frozen).decode
    sample_PSK = decode(x_PNZ[:, :2])
    for sample, name in enumerate(("pred1", "pred2")):
        published_tokens = golden[name]
        yield (
            f"decoded tokens {sample + 1}",
            sample_PSK[:, sample].reshape(published_tokens.shape),
            published_tokens,
        )
    if task.chunk_size >= brier.ORDERS:
        terms_P4 = brier.brier_terms(sample_PSK, tokens_BLK[:, 1:].reshape(-1, task.chunk_size))
        yield "Brier 1 to 4", terms_P4.mean(0), golden["brier"]

    def loss(params: dict) -> jax.Array:
        return energy.loss(params, golden["input_ids"], golden["input_ids"], noise_PNE, eps_PMZ)

    total, gradient = jax.value_and_grad(loss)(energy.params)
    yield "training loss", total, golden["train_loss"]
    yield "norm of all gradients", optax.tree.norm(gradient), golden["grad_norm_total"]
    yield from _gradients(energy.rows, gradient, golden)
    # The published code draws for the counted chunks alone; they are the first ones, so the same
    # draws meet the same chunks, and what the masked ones draw has no weight.
    masked = energy.loss(
        energy.params, golden["masked_input_ids"], golden["masked_labels"], noise_PNE, eps_PMZ
    )
    yield "masked training loss", masked, golden["masked_train_loss"]


def generate_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Cached generation at temperature 1 with recorded noise, one draw a chunk."""
    energy = _EnergyModel(
        folder.with_name(folder.name.removesuffix("_generate")), num_target_samples=1
    )
    noise_SBE = jnp.asarray(golden["head_rand"] - 0.5)
    prompt_BLK = energy.chunks(golden["prompt"])
    model = energy.task.bind(energy.params, energy.frozen)

    def next_chunk(h_BD: jax.Array, step: jax.Array) -> jax.Array:
        return model.decode(energy.latents(energy.params, h_BD, noise_SBE[step][:, None]))[:, 0]

    batch, prompt_chunks, _ = prompt_BLK.shape
    lengths = jnp.full(batch, prompt_chunks)
    continuation = sampling.generate(
        model, prompt_BLK, lengths, len(noise_SBE), eos_id=-1, next_chunk=next_chunk
    )
    tokens = np.concatenate([prompt_BLK, continuation.tokens], axis=1)
    yield "tokens", tokens.reshape(batch, -1), golden["tokens"]


def temperature_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Level, counts and probabilities of the batch rule on recorded pools."""
    for case in sorted({key.split("/")[0] for key in golden}):
        pool_1NK = jnp.asarray(golden[f"{case}/patches"])[None]
        count_1N = temperature.count_equal(pool_1NK)
        weight_1N, level_1 = temperature.batch_log_weights(count_1N, 1 / float(golden[f"{case}/n"]))
        probability_N = np.asarray(jax.nn.softmax(weight_1N[0]))
        is_chunk = (golden[f"{case}/unique"][:, None] == golden[f"{case}/patches"]).all(-1)
        yield f"{case} level", level_1[0], golden[f"{case}/n_used"]
        yield f"{case} probabilities", is_chunk @ probability_N, golden[f"{case}/probs"]


# Case names are npz file names; the first pattern that matches the whole name wins.
CASES: dict[str, Callable[[pathlib.Path, Arrays], Comparisons]] = {
    r"ae_k\d+": autoencoder_case,
    r"energy_k\d+": energy_case,
    r"energy_k\d+_generate": generate_case,
    r"temperature": temperature_case,
}
