"""The accuracy-diversity trade-off, on a known distribution."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.config import resolve
from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.evaluation import tradeoff
from calm_jax.evaluation.evaluator import EvalConfig
from calm_jax.parallel.mesh import MeshConfig, make_mesh
from calm_jax.run import report
from calm_jax.sampling.chunk_model import ChunkModel
from configs import quickstart
from tests.compiler_options import OPTIMISED
from tests.sampling import laws

PAD = ByteTokenizer(b"").pad_id
# For each K, the chunks of the known distribution and their probabilities; chunks share prefixes.
CHUNKS = {4: [(1, 1, 1, 1), (1, 1, 1, 2), (1, 2, 1, 1), (2, 1, 1, 1)], 2: [(1, 1), (1, 2), (2, 1)]}
LAWS = {4: np.array([0.4, 0.3, 0.2, 0.1]), 2: np.array([0.5, 0.3, 0.2])}


def known_model(chunk_size: int) -> ChunkModel:
    """A model whose next chunk has the same distribution in every context."""

    def advance(tokens_BLK, memory):
        return jnp.zeros((*tokens_BLK.shape[:2], 1)), memory

    return dataclasses.replace(
        laws.known_model(LAWS[chunk_size], book=CHUNKS[chunk_size]),
        advance=advance,
        empty_cache=lambda batch, size, window: jnp.zeros(batch),
        fork=lambda cache, length_B, size: cache,
    )


@pytest.fixture(autouse=True)
def _optimised(monkeypatch):
    """Comparing all pairs of 500 draws takes far longer than optimising the program."""
    for name, static in (("_sample", "config"), ("_collision", "num_draws")):
        optimised = jax.jit(
            getattr(tradeoff, name),
            static_argnames=("bind", static),
            compiler_options=OPTIMISED,
        )
        monkeypatch.setattr(tradeoff, name, optimised)


@functools.cache
def task(chunk_size: int):
    def bind(params, frozen):
        return known_model(chunk_size)

    return types.SimpleNamespace(chunk_size=chunk_size, bind=bind)


class Blocks:
    """Validation text of ones in blocks of `size` tokens; each ends with 8 pads, which are not scored."""

    def __init__(self, size: int = 64):
        self._size = size

    def __len__(self):
        return 60

    def __getitem__(self, index):
        tokens = np.ones(self._size, np.int32)
        tokens[-8:] = PAD
        return {"tokens": tokens, "targets": tokens}


CONFIG = resolve(quickstart.get_config())


def measure(chunk_size: int, temperatures, **changes):
    config: EvalConfig = dataclasses.replace(
        CONFIG.eval, temperatures=temperatures, plane_contexts=800, **changes
    )
    sampler = dataclasses.replace(CONFIG.sample.sampler_config, max_draws=216)
    mesh = make_mesh(MeshConfig(-1, 1, 1))
    frozen = {"params": {}}
    chosen = tradeoff.ways(config, sampler, has_autoencoder=True)
    contexts = tradeoff.contexts_of(Blocks(), task(chunk_size), config, PAD)
    return tradeoff.measure(task(chunk_size), {}, frozen, contexts, config, chosen, mesh)


def expected(chunk_size: int, exponent: float) -> tuple[np.ndarray, np.ndarray]:
    """The accuracy and the collision probability of the first 1 to 4 tokens, for independent chunks of the distribution's power."""
    law = LAWS[chunk_size] ** exponent
    law /= law.sum()
    texts, probability = np.array(CHUNKS[chunk_size]), law
    if chunk_size == 2:
        texts = np.array([(*a, *b) for a in CHUNKS[2] for b in CHUNKS[2]])
        probability = np.outer(law, law).ravel()
    accuracy, collision = [], []
    for n in range(1, 5):
        prefixes = {}
        for text, p in zip(texts[:, :n].tolist(), probability, strict=True):
            prefixes[tuple(text)] = prefixes.get(tuple(text), 0) + p
        accuracy.append(prefixes[(1,) * n])
        collision.append(sum(p**2 for p in prefixes.values()))
    return np.array(accuracy), np.array(collision)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [4, 2])
def test_accuracy_and_collision_are_those_of_the_known_law(chunk_size):
    """To five standard errors: one false alarm in a hundred thousand for all numbers. Also the cost of each sampler."""
    result = measure(chunk_size, (1.0, 0.5), samplers=("pooled", "published"), candidates=(500,))
    assert [point["sampler"] for point in result["points"]] == ["model", "pooled", "published"]
    for point, exponent in zip(result["points"], (1, 2, 2), strict=True):
        accuracy_4, collision_4 = expected(chunk_size, exponent)
        # Contexts with pads in the next four tokens count for fewer n; at least 650 of 800 count for all.
        for name, truth_4, samples in (
            ("accuracy", accuracy_4, 1300),
            ("collision", collision_4, 650),
        ):
            ours_4 = np.array([point[f"{name}_{n}"] for n in range(1, 5)])
            error_4 = np.sqrt(truth_4 * (1 - truth_4) / samples)
            # 0.005 for the bias of the published rule with 500 candidates.
            assert (abs(ours_4 - truth_4) < 5 * error_4 + 0.005).all(), name
            mean = 100 * np.prod(ours_4) ** 0.25
            assert point[name] == pytest.approx(mean, rel=1e-4)
    model, pooled, published = result["points"]
    assert (model["draws"], published["draws"]) == (1, 500)
    assert 16 <= pooled["draws"] < 40
    assert (model["exact"], published["exact"]) == (1, 0) and pooled["exact"] > 0.99
    # With so few chunks every draw has an equal one and is decoded whole; the chosen one is decoded again.
    assert published["decoded"] == 501 and model["decoded"] == 1
    # The probability that two draws of the next chunk are equal.
    collision = (LAWS[chunk_size] ** 2).sum()
    assert result["collision_probability"]["mean"] == pytest.approx(collision, abs=0.01)


def test_blocks_without_room_for_a_context_and_four_tokens_are_refused():
    config = dataclasses.replace(CONFIG.eval, temperatures=(1.0,))
    assert tradeoff.contexts_of(Blocks(16), task(4), config, PAD)
    with pytest.raises(UserError, match="no block of 4 tokens has a context with four tokens"):
        tradeoff.contexts_of(Blocks(4), task(4), config, PAD)


def test_ways_leave_out_temperatures_that_a_sampler_does_not_take(capsys):
    config = dataclasses.replace(CONFIG.eval, temperatures=(1.0, 0.7, 0.33), candidates=(50, 200))
    sampler = CONFIG.sample.sampler_config
    chosen = tradeoff.ways(config, sampler, has_autoencoder=True)
    names = [(way.temperature, way.sampler, way.num_candidates) for way in chosen]
    assert len(names) == len(set(names)) == 1 + 6 + 8
    assert "skipping sampler='published' at temperature 0.7" in capsys.readouterr().out
    assert len(tradeoff.ways(config, sampler, has_autoencoder=False)) == 3
    # A run's own number of candidates is replaced, and not checked for the samplers that it does not name.
    many = dataclasses.replace(sampler, num_candidates=5000)
    found = tradeoff.ways(config, many, has_autoencoder=True)
    assert [way.num_candidates for way in found if way.sampler == "batch"] == [50, 200, 50, 200]
    # Candidates would be decoded within the measured time, and nobody would see them.
    shown = dataclasses.replace(sampler, shown_candidates=3)
    assert tradeoff.ways(config, shown, has_autoencoder=True) == chosen
    hot = dataclasses.replace(config, temperatures=(1.5,))
    with pytest.raises(UserError, match=r"^eval\.temperatures=\(1\.5,\): temperature=1\.5 must"):
        tradeoff.ways(hot, sampler, has_autoencoder=True)
    cold = dataclasses.replace(config, temperatures=(-1.0,))
    for has_autoencoder, words in ((True, r"in \(0, 1\]"), (False, "at least 0 and finite")):
        message = rf"^eval\.temperatures=\(-1\.0,\): temperature=-1 must be {words}"
        with pytest.raises(UserError, match=message):
            tradeoff.ways(cold, sampler, has_autoencoder)
    few = dataclasses.replace(sampler, max_draws=1)
    with pytest.raises(UserError, match=r"^eval\.temperatures=\(0\.5,\): max_draws=1 must be"):
        tradeoff.ways(
            dataclasses.replace(config, temperatures=(0.5,), samplers=("pooled",)),
            few,
            has_autoencoder=True,
        )
    # No other temperature would help.
    many = dataclasses.replace(sampler, max_draws=10_000)
    with pytest.raises(UserError, match=r"^max_draws=10000 must be at most 4096"):
        tradeoff.ways(
            dataclasses.replace(config, samplers=("growing",)), many, has_autoencoder=True
        )


@pytest.mark.slow
def test_the_trade_off_is_drawn_and_printed_with_every_sampler(tmp_path, capsys):
    result = measure(4, (1.0, 0.5), samplers=("published", "noise"), candidates=(20, 50))
    report.draw_plane(result, tmp_path / "plane.png")
    assert [path.name for path in tmp_path.iterdir()] == ["plane.png"]
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    report.print_plane(result)
    printed = capsys.readouterr().out
    for name in ("model", "published 20", "published 50", "noise", "two draws of the model"):
        assert name in printed
