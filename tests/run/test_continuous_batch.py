"""Continuous batching: a text is what it is alone, whatever else runs beside it, and whenever its prompt comes."""

import dataclasses
import functools
import json
import random
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.build import make_lm_task
from calm_jax.config import resolve
from calm_jax.models.layers import in_compute_dtype
from calm_jax.run.continuation import Row
from calm_jax.sampling import decode
from tests import tiny_recipe
from tests.simulated_devices import run_program
from tests.tiny_model import tiny

SEED = 3
# Some are whole chunks of four tokens, some are longer than a context of 32 tokens.
LENGTHS = (5, 1, 40, 12, 3, 70, 8, 16, 2, 33)


@functools.cache
def make_prompts(arguments: str) -> list[list[int]]:
    """Random prompts. Where one token is left over after whole chunks of CALM, it is one that the model is likely to draw."""
    generator = tiny(arguments).generator()
    options = dataclasses.replace(generator.options, max_tokens=1, temperature=1.0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, size).tolist() for size in LENGTHS]
    for prompt in prompts:
        if len(prompt) > 4 and len(prompt) % 4 == 1:
            drawn = generator.generate([prompt[:-1]] * 32, options)
            prompt[-1] = statistics.mode(token for one in drawn for token in one.tokens)
    return prompts


def make_rows(case: str) -> list[Row]:
    """Rows with texts of random lengths; those of two calls are equal."""
    arguments, context, changes = CASES[case]
    generator, prompts = tiny(arguments, context).generator(), make_prompts(arguments)
    rows = []
    for index, max_tokens in enumerate(np.random.default_rng(0).integers(1, 30, len(prompts))):
        options = dataclasses.replace(
            generator.options, max_tokens=int(max_tokens), num_candidates=4, **changes
        )
        rows.append(generator.rows(prompts, options, SEED)[index])
    return rows


def run_all(batch) -> None:
    while not batch.is_idle:
        batch.step()


def results(rows: list[Row]) -> list[dict]:
    """All of the continuations but their times."""
    done = [dataclasses.asdict(row.continuation) for row in rows]
    return [{name: x for name, x in one.items() if name != "seconds"} for one in done]


CASES = {
    "T = 1": ("k=4", 256, {"temperature": 1.0}),
    "T = 1/2": ("k=4", 256, {"temperature": 0.5, "sampler": "pooled"}),
    "match": (
        "k=4",
        32,
        {"temperature": 1.0, "long_context": "slide", "prompt_alignment": "match"},
    ),
    "baseline": (
        "head=softmax",
        32,
        {"temperature": 0.8, "top_p": 0.9, "long_context": "slide"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_text_is_the_same_in_every_batch_and_whenever_its_prompt_comes(case):
    """As in a batch of its own. Prompts come in random order, before and between steps of random sizes."""
    arguments, context, _ = CASES[case]
    generator = tiny(arguments, context).generator()
    rows = make_rows(case)
    for row in rows:
        batch = generator.batch(1)
        batch.submit(row)
        run_all(batch)
    expected = results(rows)
    assert len({tuple(one["tokens"]) for one in expected}) == len(LENGTHS)
    if case == "match":
        assert {one["alignment"] for one in expected} == {"match", "left", "whole"}
    rng = random.Random(0)
    for num_places in (1, 3, 8):
        rows, batch = make_rows(case), generator.batch(num_places)
        order = rng.sample(range(len(rows)), len(rows))
        while order or not batch.is_idle:
            for _ in range(rng.randrange(4)):
                if order:
                    batch.submit(rows[order.pop()])
            batch.step(rng.choice([1, 2, 16]))
            assert batch.num_running <= num_places
        assert results(rows) == expected, num_places


@pytest.mark.slow
def test_at_temperature_1_prompts_with_other_samplers_do_not_wait():
    generator = tiny().generator()
    warm = dataclasses.replace(generator.options, max_tokens=8, temperature=1.0)
    options = [dataclasses.replace(warm, sampler=name) for name in ("pooled", "batch", "growing")]
    prompts = ["a", "b", "c"]
    rows = [generator.rows(prompts, one, 0)[index] for index, one in enumerate(options)]
    batch = generator.batch(3)
    for row in rows:
        batch.submit(row)
    batch.step(1)
    assert (batch.num_running, batch.num_waiting) == (3, 0)
    run_all(batch)
    for row, one in zip(rows, options, strict=True):
        index = row.continuation.index
        assert row.continuation.tokens == generator.generate(prompts, one)[index].tokens


@pytest.mark.slow
def test_an_idle_batch_holds_no_cache():
    """Whether its texts were finished or cancelled; a server may wait for the next request for hours."""
    generator = tiny().generator()
    options = dataclasses.replace(generator.options, max_tokens=16, temperature=1.0)

    def held() -> int:
        """Bytes of the arrays that exist now and did not exist before the batch."""
        return sum(x.nbytes for x in jax.live_arrays() if id(x) not in before)

    # The arrays themselves are kept too, so that no new one gets the id of an old one.
    before = {id(x): x for x in jax.live_arrays()}
    batch = generator.batch(2)
    for ends_by_cancelling in (False, True):
        rows = generator.rows(["a", "b"], options, 0)
        for row in rows:
            batch.submit(row)
        batch.step(1)
        cache = batch._state.cache
        size = cache.key.nbytes + cache.value.nbytes
        del cache
        assert held() > size
        if ends_by_cancelling:
            for row in rows:
                batch.cancel(row)
        else:
            run_all(batch)
        assert batch.is_idle and held() < size / 4


@pytest.mark.slow
def test_prompts_with_another_sampler_wait_and_those_behind_them_too():
    generator = tiny().generator()
    cold = dataclasses.replace(generator.options, max_tokens=8, temperature=0.5, sampler="batch")
    warm = dataclasses.replace(cold, temperature=1.0)
    options = [warm, warm, cold, warm]
    prompts = ["a", "b", "c", "d"]
    rows = [generator.rows(prompts, one, 0)[index] for index, one in enumerate(options)]
    batch, finished = generator.batch(4), []
    for row in rows:
        batch.submit(row)
    while not batch.is_idle:
        pieces = batch.step(1)
        finished.append([piece.continuation.index for piece in pieces if piece.is_last])
    assert finished == [[], [0, 1], [], [2], [], [3]]
    for row, one in zip(rows, options, strict=True):
        index = row.continuation.index
        assert row.continuation.tokens == generator.generate(prompts, one)[index].tokens


@pytest.mark.slow
def test_nothing_more_is_computed_for_a_cancelled_text_and_its_place_is_free():
    generator = tiny().generator()
    options = dataclasses.replace(generator.options, max_tokens=200, temperature=1.0)
    rows = generator.rows(["a", "b", "c", "d"], options, 0)
    batch = generator.batch(2)
    for row in rows:
        batch.submit(row)
    batch.step(2)
    assert (batch.num_running, batch.num_waiting) == (2, 2)
    batch.cancel(rows[0])
    batch.cancel(rows[3])
    assert (batch.num_running, batch.num_waiting) == (1, 1)
    pieces = batch.step(1)
    assert [piece.continuation.index for piece in pieces] == [2, 1]
    assert len(rows[0].continuation.tokens) == 8 and not rows[3].continuation.tokens
    batch.cancel(rows[1])
    batch.cancel(rows[2])
    assert batch.is_idle and batch.step() == []
    assert {row.continuation.finish for row in rows} == {"cancelled"}


@pytest.mark.slow
def test_a_cancelled_text_that_waits_does_not_decide_the_size_of_the_next_cache():
    generator = tiny("k=4", 1024).generator()
    options = dataclasses.replace(generator.options, max_tokens=8, temperature=1.0)
    short, later = (generator.rows(["a"], options, seed)[0] for seed in (0, 1))
    long = generator.rows(["b"], dataclasses.replace(options, max_tokens=1000), 0)[0]
    places = []
    for cancelled in ((), (short, long)):
        batch = generator.batch(1)
        for row in cancelled:
            batch.submit(row)
        for row in cancelled:
            batch.cancel(row)
        batch.submit(later)
        batch.step(1)
        places.append(batch._state.cache.key.shape)
        later = generator.rows(["a"], options, 1)[0]
    assert places[0] == places[1]


@pytest.mark.slow
def test_the_last_prompts_of_a_list_do_not_compile_anew():
    generator = tiny().generator()
    options = dataclasses.replace(
        generator.options, max_tokens=8, temperature=1.0, batch_size=4, stop=("zz",)
    )
    generator.generate(["a"] * 8, options)
    compiled = decode.decode._cache_size(), decode.insert._cache_size()
    for num in (3, 4, 5, 9, 11):
        generator.generate(["a"] * num, options)
    now = decode.decode._cache_size(), decode.insert._cache_size()
    # Prompts are read one, two or four at a time.
    assert now[0] == compiled[0] and now[1] <= compiled[1] + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["head=energy", "head=diffusion", "head=flow", "head=softmax", "token_predictor"]
)
def test_weights_in_the_compute_dtype_give_the_same_numbers(variant):
    """Bit for bit, in bfloat16; kernels and embeddings are all that is large. "token_predictor" decodes with a token prior."""
    tree = tiny_recipe.get_config(f"nowhere/*.txt,{variant}")
    tree.compute_dtype = "bfloat16"
    made = tiny(variant)
    config = resolve(tree)
    task = make_lm_task(config, made.tokenizer)
    cast = in_compute_dtype(made.params, config.compute_dtype)
    kept = [x for x in jax.tree.leaves(cast) if x.dtype == jnp.float32]
    assert 10 * sum(x.size for x in kept) < sum(x.size for x in jax.tree.leaves(made.params))
    tokens_BLK = np.random.default_rng(0).integers(0, 256, (2, 6, task.chunk_size))

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, cached):
        model = task.bind(params, made.frozen)
        memory = model.empty_cache(2, 8, 8) if cached else None
        h_BLD, _ = model.advance(tokens_BLK, memory)
        keys = jax.random.split(jax.random.key(0), 2)
        h_BD = h_BLD[:, -1]
        latent_BNZ = model.latents(h_BD, 5, keys, 1)
        return h_BLD, latent_BNZ, model.decode(h_BD, latent_BNZ)

    for cached in (False, True):
        jax.tree.map(np.testing.assert_array_equal, run(cast, cached), run(made.params, cached))


MESHES = """
import dataclasses, json, sys
import jax
from calm_jax.parallel.mesh import MeshConfig, make_mesh, shardings
from calm_jax.run.generator import Generator
from tests.tiny_model import tiny

made, prompts = tiny(), ["def f(x):", "", "class", "a b", "import os", "x" * 30]
found = []
for sizes in (None, (2, 2, 1), (1, 2, 2)):
    params, frozen = made.params, made.frozen
    if sizes:
        mesh = make_mesh(MeshConfig(*sizes))
        params, frozen = (jax.device_put(x, shardings(x, mesh)) for x in (params, frozen))
    generator = Generator(made.task, params, frozen, made.tokenizer, made.config)
    options = dataclasses.replace(generator.options, temperature=0.5, max_tokens=20)
    batch = generator.batch(3)
    rows = generator.rows(prompts, options, 0)
    for row in rows:
        batch.submit(row)
    shards = set()
    while not batch.is_idle:
        batch.step(4)
        state = batch._state
        if state is None:
            continue
        shards.add((state.h.shape, state.h.sharding.shard_shape(state.h.shape)))
        key = state.cache.key
        shards.add((key.shape[1:3], key.sharding.shard_shape(key.shape)[1:3]))
    found.append([[row.continuation.tokens for row in rows], sorted(shards)])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_rows_are_split_over_the_devices_of_a_mesh_and_texts_are_the_same():
    done = run_program(4, MESHES)
    (expected, _), (rows, of_rows), (both, of_both) = json.loads(done.stdout)
    assert len({tuple(one) for one in expected}) == 6
    assert rows == both == expected
    # Three places do not divide over the devices, so there are four. [places, heads] of the cache, [places, width] of the state.
    assert of_rows == [[[4, 2], [1, 2]], [[4, 16], [1, 16]]]
    assert of_both == [[[4, 2], [2, 1]], [[4, 16], [2, 16]]]
