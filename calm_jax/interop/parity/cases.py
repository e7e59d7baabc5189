"""The golden cases that `verify` knows: this implementation gets the recorded draws and should give the recorded results.

A case is a generator: from a checkpoint folder and the recorded arrays it yields tuples of a quantity's name, the value
computed here and the recorded value. tests/golden/README.md describes the recorded arrays. P counts the predicted chunks
of all rows, J the chunks drawn for one start of an n-gram; other letters as in calm_jax/models.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from calm_jax import brier
from calm_jax.interop.parity import expected, head_cases
from calm_jax.interop.parity.models import PublishedAutoencoder, PublishedCalm, PublishedLlama
from calm_jax.interop.parity.recorded import Arrays, Comparisons, Missing, gradients, up_to_eos
from calm_jax.losses import cross_entropy, energy_score
from calm_jax.models.autoencoder import Noise
from calm_jax.sampling import decode, temperature
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.samplers import sample_token
from calm_jax.sampling.search import Sampled
from calm_jax.tasks import base, language_model


def autoencoder_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Posteriors, logits, evaluation and training losses, gradients."""
    autoencoder = PublishedAutoencoder(folder)
    model, params = autoencoder.model, autoencoder.variables["params"]
    tokens_PK = jnp.asarray(golden["input_ids"].reshape(-1, model.chunk_size))
    latent_size = model.config.latent_size

    posterior = autoencoder.apply(params, tokens_PK, method="encode")
    yield "posterior mean", posterior.mean, golden["enc_mean"].reshape(-1, latent_size)
    yield "posterior log std", posterior.log_std, golden["enc_log_std"].reshape(-1, latent_size)

    latents = golden["dec_latents"].reshape(-1, latent_size)
    logits = autoencoder.apply(params, latents, method="decode")
    yield "decoder logits", logits, golden["dec_logits"].reshape(logits.shape)

    latents = posterior.mean + posterior.std * golden["eval_eps"][:, 0]
    logits = autoencoder.apply(params, latents, method="decode")
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
        ce_PK, kl_P = autoencoder.apply(params, tokens_PK, noise, method="loss")
        total = (ce_PK.sum(-1) + model.config.kl_weight * kl_P).mean()
        return total, (ce_PK.mean(), kl_P.mean())

    compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (total, (ce, kl)), gradient = compute(params)
    yield "training cross-entropy", ce, golden["train_ce"]
    yield "training KL", kl, golden["train_kl"]
    yield "training loss", total, golden["train_loss"]
    yield from gradients(autoencoder.rows, gradient, golden, expected.AUTOENCODER_GRADIENTS)


def _brier(
    model: ChunkModel, protocol: brier.Protocol, tokens_BLK: jax.Array, draws_BLJ: jax.Array
) -> jax.Array:
    """Brier 1 to 4, averaged over all starts, [4].

    `model.latents` expects recorded draws in place of random keys, and so does this function.
    """

    @jax.jit
    def terms(tokens_BLK: jax.Array, draws_BLJ: jax.Array) -> jax.Array:
        reading = brier.read(model, tokens_BLK, None)
        return brier.brier_terms(model, tokens_BLK, reading, draws_BLJ, protocol, 1, 64)

    return terms(tokens_BLK, draws_BLJ).mean((0, 1))


def energy_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Hidden states, head, energy score, losses, gradients, Brier 1 to 4."""
    lm = PublishedCalm(folder)
    task, params = lm.task, lm.params
    ids, tokens_BLK = golden["input_ids"], lm.chunks(golden["input_ids"])
    rows, num_chunks, chunk_size = tokens_BLK.shape
    noise_PNE = jnp.asarray(golden["head_rand"].swapaxes(0, 1) - 0.5)
    eps_PMZ = jnp.asarray(golden["energy_eps"].swapaxes(0, 1))

    variables = {"params": params}
    embedded: Any = task.model.apply(variables, tokens_BLK[:, :-1], method="embedded")
    yield "input embeddings", embedded, golden["inputs_embeds"]
    yield "hidden states", task.hidden(params, tokens_BLK), golden["hidden_states"]

    posterior = lm.posterior(ids)
    yield "target mean", posterior.mean, golden["ae_mean"]
    yield "target log std", posterior.log_std, golden["ae_log_std"]
    h_PD = lm.predicting(params, ids)
    x_PNZ = lm.head(params, h_PD, noise_PNE)
    yield "head draws", x_PNZ.swapaxes(0, 1), golden["head_out"]
    score_P = energy_score(x_PNZ, posterior, eps_PMZ, float(golden["beta"]))
    yield "energy score", score_P, golden["energy_score"]
    yield "evaluation loss", -score_P.mean(), golden["eval_loss"]

    sample_PSK = lm.bind().decode(h_PD, x_PNZ[:, :2])
    for sample, name in enumerate(("pred1", "pred2")):
        published = golden[name]
        ours = sample_PSK[:, sample].reshape(published.shape)
        yield f"decoded tokens {sample + 1}", ours, published

    def latents(h_PD: jax.Array, num_draws: int, noise_PNE: jax.Array, scale: float) -> jax.Array:
        return lm.head(params, h_PD, noise_PNE)

    # The first chunk of every continuation uses the draws of the teacher-forced pass. The later ones were recorded by start
    # and step.
    first = noise_PNE[:, :2].reshape(rows, num_chunks - 1, 1, 2, -1)
    draws_BLJSE = np.repeat(np.asarray(first), brier.chunks_of(chunk_size), axis=2)
    if chunk_size < brier.ORDERS:
        for (start, step), noise_SBE in zip(
            golden["seq_call_index"], golden["seq_rand"][:, :, :, 0] - 0.5, strict=True
        ):
            draws_BLJSE[:, start, step] = noise_SBE.swapaxes(0, 1)
    model = dataclasses.replace(lm.bind(), latents=latents)
    terms_4 = _brier(model, task.protocol, tokens_BLK, jnp.asarray(draws_BLJSE))
    yield "Brier 1 to 4", terms_4, golden["brier"]

    def loss(params: dict, ids: np.ndarray, labels: np.ndarray) -> jax.Array:
        x_PNZ = lm.head(params, lm.predicting(params, ids), noise_PNE)
        score_P = energy_score(x_PNZ, lm.posterior(ids), eps_PMZ, task.model.head.config.beta)
        total, weight = base.total(
            -score_P, language_model.counted_chunks(0, lm.chunks(labels)).ravel()
        )
        return total / weight

    total, gradient = jax.jit(jax.value_and_grad(loss))(params, ids, ids)
    yield "training loss", total, golden["train_loss"]
    yield "norm of all gradients", optax.tree.norm(gradient), golden["grad_norm_total"]
    yield from gradients(lm.rows, gradient, golden, expected.ENERGY_GRADIENTS)
    # The published code draws only for the chunks that count in the loss. These come first, so that they get the same draws
    # here; the draws of the masked chunks have no weight.
    masked = loss(params, golden["masked_input_ids"], golden["masked_labels"])
    yield "masked training loss", masked, golden["masked_train_loss"]


def generate_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Tokens of cached generation at temperature 1, with one recorded draw for each chunk."""
    lm = PublishedCalm(folder.with_name(folder.name.removesuffix("_generate")))
    noise_SBE, model = jnp.asarray(golden["head_rand"] - 0.5), lm.bind()

    def next_chunk(h_BD: jax.Array, step: jax.Array) -> jax.Array:
        return model.decode(h_BD, lm.head(lm.params, h_BD, noise_SBE[step][:, None]))[:, 0]

    tokens = _continued(model, lm.chunks(golden["prompt"]), len(noise_SBE), next_chunk)
    given = golden["prompt"].shape[1]
    ours, published = (up_to_eos(ids, given, lm.eos_id) for ids in (tokens, golden["tokens"]))
    yield "tokens", ours, published


def _continued(
    model: ChunkModel,
    prompt_BLK: jax.Array,
    num_chunks: int,
    next_chunk: Callable[[jax.Array, jax.Array], jax.Array],
) -> np.ndarray:
    """Prompts and their continuations, token ids [B, T].

    Args:
      model: the model, which embeds chunks and advances its cache.
      prompt_BLK: the prompts.
      num_chunks: how many chunks to generate.
      next_chunk: a function of the hidden states [B, D] and the step that returns the next chunks, int32 [B, K].
    """
    batch, prompt_chunks, _ = prompt_BLK.shape
    size = prompt_chunks + num_chunks

    def one(h_BD: jax.Array, step: jax.Array, active_B: jax.Array) -> Sampled:
        once_B = jnp.ones(batch, jnp.int32)
        return Sampled(next_chunk(h_BD, step), once_B, once_B, active_B)

    state = decode.read_prompts(
        model, prompt_BLK, jnp.full(batch, prompt_chunks), size, size, piece=prompt_chunks
    )
    _, chunks = decode.generate_chunks(
        model, state, num_chunks, num_chunks, eos_id=-1, next_chunk=one
    )
    return np.concatenate([prompt_BLK, chunks.tokens], axis=1).reshape(batch, -1)


def autoregressive_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Logits, loss, gradients, Brier 1 to 4 with recorded draws, greedy generation."""
    lm = PublishedLlama(folder)
    task, tokens_BLK, model = lm.task, lm.chunks(golden["input_ids"]), lm.bind()
    h_BLD, _ = model.advance(tokens_BLK, None)
    yield "logits", lm.head(lm.params, h_BLD, method="logits"), golden["logits"]

    def loss(params: dict) -> jax.Array:
        batch = {"tokens": tokens_BLK[..., 0], "targets": tokens_BLK[..., 0]}
        total, weight = task.loss(params, {}, batch, jax.random.split(jax.random.key(0), 2))["loss"]
        return total / weight

    total, gradient = jax.jit(jax.value_and_grad(loss))(lm.params)
    yield "loss", total, golden["loss"]
    yield from gradients(lm.rows, gradient, golden, expected.AUTOREGRESSIVE_GRADIENTS)

    rows, num_tokens, _ = tokens_BLK.shape
    draws_BLJS1 = np.zeros((rows, num_tokens - 1, brier.ORDERS, 2, 1), np.int32)
    for (start, step), drawn_BS in zip(
        golden["multinomial_index"], golden["multinomial"], strict=True
    ):
        draws_BLJS1[:, start, step, :, 0] = drawn_BS
    recorded = dataclasses.replace(model, latents=lambda h_PD, num_draws, drawn, noise_scale: drawn)
    terms_4 = _brier(recorded, task.protocol, tokens_BLK, jnp.asarray(draws_BLJS1))
    yield "Brier 1 to 4", terms_4, golden["brier"]

    prompt_BLK, log_probs = lm.chunks(golden["greedy_prompt"]), model.log_probs
    assert log_probs is not None

    def most_likely(h_BD: jax.Array, step: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), len(h_BD))
        return sample_token(log_probs(h_BD), keys, temperature=0, top_p=1)[:, None]

    more = golden["greedy_tokens"].shape[1] - prompt_BLK.shape[1]
    tokens = _continued(model, prompt_BLK, more, most_likely)
    given = prompt_BLK.shape[1]
    ours, published = (
        up_to_eos(ids, given, lm.eos_id) for ids in (tokens, golden["greedy_tokens"])
    )
    yield "greedy tokens", ours, published


def temperature_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """The published approximate sampler: how many equal draws it asks for (level), and its choice probabilities."""
    recorded = {key.split("/")[0] for key in golden}
    for case in sorted(recorded.union(expected.TEMPERATURE_CASES)):
        given = [golden[f"{case}/{name}"] for name in ("patches", "n", "unique")]
        missing = [one for one in given if isinstance(one, Missing)]
        if missing:
            yield case, np.zeros(0), missing[0]
            continue
        patches_NK, n, unique_UK = given
        count_1N = temperature.count_equal(jnp.asarray(patches_NK)[None])
        weight_1N, level_1 = temperature.log_weights(count_1N, 1 / float(n), leave_out=False)
        probability_N = np.asarray(jax.nn.softmax(weight_1N[0]))
        is_chunk = (unique_UK[:, None] == patches_NK).all(-1)
        yield f"{case} level", level_1[0], golden[f"{case}/n_used"]
        yield f"{case} probabilities", is_chunk @ probability_N, golden[f"{case}/probs"]


# The case of an npz file: the first pattern that matches the whole file name without its ending.
CASES: dict[str, Callable[[pathlib.Path, Arrays], Comparisons]] = {
    r"ae_k\d+": autoencoder_case,
    r"energy_k\d+": energy_case,
    r"energy_k\d+_generate": generate_case,
    r"temperature": temperature_case,
    r"ar": autoregressive_case,
    r"diffusion_head": head_cases.diffusion_head_case,
    r"diffusion_model": head_cases.diffusion_model_case,
    r"flow_head": head_cases.flow_head_case,
    r"flow_model": head_cases.flow_model_case,
}
