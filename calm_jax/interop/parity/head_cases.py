"""The golden cases of the diffusion and flow heads; see cases.py."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calm_jax.interop.parity import expected
from calm_jax.interop.parity.models import PublishedCalm
from calm_jax.interop.parity.recorded import Arrays, Comparisons, gradients
from calm_jax.models.heads import diffusion, flow
from calm_jax.models.heads.adaln import time_features
from calm_jax.tasks import Params


def _lm(folder: pathlib.Path) -> PublishedCalm:
    """The model of a case: `diffusion_head` and `diffusion_model` are about the checkpoint `diffusion`."""
    return PublishedCalm(folder.with_name(folder.name.partition("_")[0]))


def _one(x: np.ndarray) -> jax.Array:
    """[P, ...] -> [P, 1, ...]: an array over positions with a draws axis, for one draw each."""
    return jnp.asarray(x)[:, None]


def _head_gradients(
    lm: PublishedCalm,
    loss: Callable[[Params], jax.Array],
    golden: Arrays,
    names: Iterable[str],
) -> Comparisons:
    """Gradients of a loss that depends only on the head: those of the other parameters are zero."""
    zeros = jax.tree.map(np.zeros_like, lm.params)
    gradient = zeros | {"head": jax.jit(jax.grad(loss))(lm.params)["head"]}
    yield from gradients(lm.rows, gradient, golden, names)


def _schedule(schedule: diffusion.Schedule, prefix: str, golden: Arrays) -> Comparisons:
    """All arrays of a noise schedule; `prefix` is that of the recorded names."""
    ours = {
        "timestep_map": schedule.time,
        "alphas_cumprod": schedule.alpha_bar,
        "betas": schedule.beta,
        "posterior_variance": schedule.posterior_variance,
        "posterior_log_variance_clipped": schedule.posterior_log_variance,
        "posterior_mean_coef1": schedule.mean_of_start,
        "posterior_mean_coef2": schedule.mean_of_state,
    }
    for name, values in ours.items():
        yield f"schedule {prefix}_{name}", values, golden[f"{prefix}_{name}"]


def diffusion_head_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Noise schedules, network, both terms of the loss, gradients, single reverse steps, full sampling."""
    lm = _lm(folder)
    params, num_steps = lm.params, lm.task.model.head.config.num_steps
    trained = diffusion.cosine_schedule()
    sampled = diffusion.respaced(trained, num_steps)
    yield from _schedule(trained, "train", golden)
    yield from _schedule(sampled, "gen", golden)

    h_PD, step_P = jnp.asarray(golden["z"]), jnp.asarray(golden["t"])
    target, noise = jnp.asarray(golden["target"]), jnp.asarray(golden["noise"])
    state = diffusion.diffused(trained, target, noise, step_P)
    yield "diffused state", state, golden["x_t"]
    yield "time features", time_features(step_P[:5]), golden["timestep_embedding"]
    output = lm.head(params, state[:, None], step_P[:, None], h_PD, method="predict")[:, 0]
    yield "network", output, golden["net_out"]
    error_P, bound_P = diffusion.loss_terms(output, target, noise, step_P)
    yield "error of the noise", error_P, golden["mse"]
    yield "variational bound", bound_P, golden["vb"]

    def loss(params: Params) -> jax.Array:
        draws = (_one(golden["target"]), step_P[:, None], _one(golden["noise"]))
        return lm.head(params, h_PD, *draws, method="loss_of_draws")

    yield "loss", loss(params), golden["loss"]
    yield from _head_gradients(
        lm, lambda params: loss(params).mean(), golden, expected.DIFFUSION_HEAD_GRADIENTS
    )

    # One reverse step from a given state.
    state, step = jnp.asarray(golden["step_x"]), jnp.asarray(golden["step_t"])
    time = jnp.asarray(sampled.time)[step]
    h_PD = jnp.asarray(golden["step_z"])
    output = lm.head(params, state[:, None], time[:, None], h_PD, method="predict")[:, 0]
    to = diffusion.reverse(sampled, output, state, step)
    yield "step: mean", to.mean, golden["step_mean"]
    yield "step: log variance", to.log_variance, golden["step_log_variance"]
    yield "step: start", to.start, golden["step_pred_x0"]
    spread = jnp.where(step[:, None] > 0, jnp.exp(0.5 * to.log_variance), 0)
    yield "step: state before", to.mean + spread * golden["step_noise"], golden["step_sample"]

    h_PD = jnp.asarray(golden["sample_z"].reshape(-1, golden["sample_z"].shape[-1]))
    # Recorded in the order of use, which is from the last step down to step 0.
    noise_of = jnp.asarray(golden["sample_step_noise"][::-1])[:, :, None]
    for name, scale in (("sample_out", 1.0), ("sample_out_temp05", 0.5)):
        draws = lm.head(
            params,
            h_PD,
            _one(golden["sample_init_noise"]),
            lambda step, scale=scale: scale * noise_of[step],
            method="denoise",
        )
        yield f"sampling, noise x {scale:g}", draws.reshape(golden[name].shape), golden[name]


def _draws_of_positions(x: np.ndarray, num_samples: int) -> jax.Array:
    """Recorded draws, which are ordered by sample and then position: [N * P, ...] -> [P, N, ...]."""
    return jnp.asarray(x.reshape(num_samples, -1, *x.shape[1:]).swapaxes(0, 1))


def _whole_model(lm: PublishedCalm, golden: Arrays, draws: tuple[np.ndarray, ...]) -> Comparisons:
    """Training loss and gradients of the whole model, with the recorded draws of targets, times and noise."""
    ids, num_samples = golden["input_ids"], int(golden["num_samples"])
    eps_PNZ = jnp.asarray(golden["latent_eps"].swapaxes(0, 1))
    of_positions = [_draws_of_positions(x, num_samples) for x in draws]

    def loss(params: Params) -> jax.Array:
        posterior = lm.posterior(ids)
        target_PNZ = posterior.mean[:, None] + posterior.std[:, None] * eps_PNZ
        h_PD = lm.predicting(params, ids)
        return lm.head(params, h_PD, target_PNZ, *of_positions, method="loss_of_draws").mean()

    total, gradient = jax.jit(jax.value_and_grad(loss))(lm.params)
    yield "training loss", total, golden["train_loss"]
    yield from gradients(lm.rows, gradient, golden, expected.MODEL_GRADIENTS)


def diffusion_model_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Training loss and gradients of the whole diffusion model."""
    yield from _whole_model(_lm(folder), golden, (golden["t"], golden["noise"]))


def flow_model_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Training loss and gradients of the whole flow model."""
    yield from _whole_model(_lm(folder), golden, (golden["t"], golden["x0"]))


def flow_head_case(folder: pathlib.Path, golden: Arrays) -> Comparisons:
    """Velocity, loss, gradients, and sampling with both solvers."""
    lm = _lm(folder)
    params, head = lm.params, lm.task.model.head
    h_PD, time_P = jnp.asarray(golden["z"]), jnp.asarray(golden["t"])
    time_index = jnp.asarray(golden["t_index"])[:, None]
    velocity = lm.head(params, _one(golden["x_t"]), time_index, h_PD, method="velocity")
    yield "velocity", velocity[:, 0], golden["net_out"]

    def loss(params: Params) -> jax.Array:
        draws = (_one(golden["target"]), time_P[:, None], _one(golden["x0"]))
        return lm.head(params, h_PD, *draws, method="loss_of_draws")

    yield "loss", loss(params), golden["loss"]
    yield from _head_gradients(
        lm, lambda params: loss(params).mean(), golden, expected.FLOW_HEAD_GRADIENTS
    )

    times = flow.integer_times(head.config.num_steps).reshape(-1)
    yield "times", times, golden["sample_t_index"]
    h_PD = jnp.asarray(golden["sample_z"].reshape(-1, golden["sample_z"].shape[-1]))
    for name, num_steps, solver in (
        ("sample_out", 10, "midpoint"),
        ("sample_out_euler", 20, "euler"),
    ):
        config = dataclasses.replace(head.config, num_steps=num_steps, solver=solver)
        draws: Any = head.clone(config=config).apply(
            {"params": params["head"]}, h_PD, _one(golden["sample_x_init"]), method="integrate"
        )
        published = golden[name]
        yield f"sampling, {num_steps} {solver} steps", draws.reshape(published.shape), published
