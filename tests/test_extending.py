"""A head and a sampler that are added from outside the package, as docs/architecture.md describes, train and generate."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from calm_jax import Generator
from calm_jax.config import as_dict, resolve
from calm_jax.cost import flops
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.interop import published
from calm_jax.losses import energy_score
from calm_jax.models.heads import LATENT_HEADS
from calm_jax.parallel.mesh import make_mesh
from calm_jax.run import preflight
from calm_jax.run.recipe import Run
from calm_jax.run.workdir import Workdir
from calm_jax.sampling import SAMPLERS
from calm_jax.sampling.search import finished, new_search
from calm_jax.training.loop import Profile
from tests import tiny_recipe
from tests.tiny_model import random_params


@dataclasses.dataclass(frozen=True)
class GaussianHeadConfig:
    """`config.lm.head` of the toy head."""

    name: str
    num_samples: int


class GaussianHead(nn.Module):
    """A Gaussian around a linear map of the hidden state, trained by the energy score."""

    config: GaussianHeadConfig
    hidden_size: int
    latent_size: int
    norm_epsilon: float
    dtype: jnp.dtype

    def setup(self):
        # A name that the backbone has for its stack.
        self.layers = nn.Sequential([nn.Dense(self.latent_size, dtype=self.dtype)])

    def sample(self, h_PD, num_draws, key_P, noise_scale):
        shape = (num_draws, self.latent_size)
        noise_PNZ = jax.vmap(lambda key: jax.random.normal(key, shape))(key_P)
        return self.layers(h_PD)[:, None] + noise_scale * noise_PNZ

    def loss(self, h_PD, posterior, key_P):
        draws_PNZ = self.sample(h_PD, self.config.num_samples, key_P, 1)
        return -energy_score(draws_PNZ, posterior, jnp.zeros_like(draws_PNZ), beta=1)


def mean_sampler(model, h_BD, key_B, active_B, config):
    """A toy sampler: the draw without noise, whatever the temperature."""
    found = new_search(model, h_BD, key_B, active_B, config)
    latent_B1Z = model.latents(h_BD, 1, key_B, 0)
    return finished(model, h_BD, found._replace(latent=latent_B1Z[:, 0]), active_B)


@pytest.fixture
def extended(tmp_path, monkeypatch):
    """The tiny recipe with the toy head and the toy sampler."""
    monkeypatch.setitem(LATENT_HEADS, "gaussian", (GaussianHead, GaussianHeadConfig))
    monkeypatch.setitem(SAMPLERS, "mean", mean_sampler)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"some text, number {number}. " * 30)
    tree = tiny_recipe.get_config(f"{tmp_path}/*.txt,k=4")
    tree.lm.head = {"name": "gaussian", "num_samples": 3}
    tree.sample.sampler = "mean"
    tree.sample.temperature = 0.5
    # No evaluation during training.
    tree.lm.training.eval_every = tree.lm.training.num_steps
    return tree


@pytest.mark.slow
def test_an_added_head_trains_and_an_added_sampler_generates(extended, tmp_path):
    """In stage 2 of a run as `calm_jax.main` trains it; the autoencoder has random parameters."""
    config, workdir = resolve(extended), Workdir(tmp_path / "run")
    assert resolve(as_dict(config)) == config
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        text = preflight.begin(config, workdir, overwrite=False, mesh=mesh)
        run = Run(config, workdir, mesh, text)
        frozen = {"params": random_params(run.autoencoder_task, seed=1)}
        params = run.train("lm", frozen, run.evaluator("lm"), Profile(-1, -1, ""))
    run.log.close()
    losses = [one["loss"] for one in run.log.records]
    assert losses[-1] < losses[0]
    # The head's own layers are no stack, though they have the name of one.
    norms = {name for name in run.log.records[0] if name.startswith("update_norm/head")}
    assert norms == {"update_norm/head"}

    generator = Generator(run.lm_task, params, frozen, run.tokenizer, config)
    texts = [generator.generate(["abcd"], seed=seed)[0].tokens for seed in (0, 1)]
    # The toy sampler has no noise, so that the seed makes no difference.
    assert texts[0] == texts[1] != []


def test_the_cost_of_an_added_head_is_unknown_and_not_wrong(extended):
    assert math.isnan(flops.training(resolve(extended), "lm", 259))


def test_an_added_head_cannot_be_exported(extended):
    with pytest.raises(UserError, match=r"lm\.head\.name='gaussian' is none of energy"):
        published.lm_values(resolve(extended), ByteTokenizer(b""), "x")


def test_without_their_entries_both_are_refused(extended, monkeypatch):
    monkeypatch.delitem(SAMPLERS, "mean")
    with pytest.raises(UserError, match="sampler='mean' is none of pooled"):
        resolve(extended)
    monkeypatch.delitem(LATENT_HEADS, "gaussian")
    with pytest.raises(UserError, match=r"lm\.head\.name='gaussian' is none of energy"):
        resolve(extended)
