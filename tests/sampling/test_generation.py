"""The decode loop, on a toy model whose continuation is known exactly; a sliding context, also on a tiny real model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.errors import UserError
from calm_jax.models import attention, kv_cache
from calm_jax.models.kv_cache import KVCache
from calm_jax.planning import hlo, memory_traffic
from calm_jax.sampling import decode
from calm_jax.sampling.chunk_model import ChunkModel
from calm_jax.sampling.config import SampleConfig
from calm_jax.sampling.decode import State
from calm_jax.sampling.search import Sampled
from tests.tiny_model import tiny

CHUNK, VOCAB, EOS = 3, 11, 10
# Chunks of a cache that holds every text of these tests.
SIZE = 16


def sample_config(**changes) -> SampleConfig:
    values = {
        "temperature": 0.5,
        "sampler": "batch",
        "num_candidates": 5,
        "max_draws": 16,
        "draws_at_once": 16,
        "top_p": 1.0,
        "max_tokens": 128,
        "stop": (),
        "prompt_alignment": "left",
        "long_context": "refuse",
        "batch_size": 8,
        "prompts": ("x",),
    }
    return SampleConfig(**(values | changes))


# --- The config


BAD = {
    "num_candidates": (0, -1, 2**40),
    "max_draws": (0, -1, 2**40),
    "draws_at_once": (0, -1),
    "shown_candidates": (-1, 65),
    "token_prior_scale": (-1.0, 1.1e6, float("inf"), float("nan")),
    "top_p": (0.0, 1.1, float("nan")),
    "max_tokens": (0, -5),
    "stop": (("",), ("x", ""), "x"),
    "prompt_alignment": ("right", ""),
    "long_context": ("cut", ""),
    "batch_size": (0, -1),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in BAD.items() for value in values]
)
def test_a_bad_sample_config_is_refused_with_its_config_key(key, value):
    sample_config()
    with pytest.raises(UserError, match=rf"^(sample\.)?{key}=") as caught:
        sample_config(**{key: value})
    assert "\n" not in str(caught.value)


def test_the_static_config_of_compiled_programs_has_only_the_samplers_options():
    """So that another number of tokens or another stop string does not compile anew."""
    one = sample_config().sampler_config
    assert (
        one == sample_config(max_tokens=5, stop=("x",), batch_size=3, prompts=("y",)).sampler_config
    )
    assert hash(one) == hash(sample_config(long_context="slide").sampler_config)
    for changes in ({"temperature": 0.4}, {"sampler": "pooled"}, {"max_draws": 17}):
        assert one != sample_config(**changes).sampler_config


def test_options_that_change_no_text_at_temperature_1_do_not_divide_batches():
    """At temperature 1 every sampler is one draw; "match" reads `max_draws` at every temperature."""
    warm = sample_config(temperature=1.0)
    for changes in ({"sampler": "pooled"}, {"sampler": "rejection", "num_candidates": 9}):
        assert dataclasses.replace(warm, **changes).batch_config == warm.batch_config
        cold = dataclasses.replace(warm, temperature=0.5, **changes)
        assert cold.batch_config == cold.sampler_config
    for changes in ({"max_draws": 17}, {"top_p": 0.9}, {"shown_candidates": 2}):
        assert dataclasses.replace(warm, **changes).batch_config != warm.batch_config


# --- The loop, on a toy


def weight_of(position, place):
    return (position * CHUNK + place) * 7 % 101 + 1


def toy_advance(tokens_BLK, cache):
    """A chunk's hidden state is a checksum of the tokens and positions of all chunks that it sees, itself included.

    Uses the real cache, with weighted tokens in place of keys and values.
    """
    position_BL = cache.length[:, None] + jnp.arange(tokens_BLK.shape[1])
    weighted_BLK = tokens_BLK * weight_of(position_BL[..., None], jnp.arange(CHUNK))
    new = weighted_BLK[..., None]
    layer = cache.for_layers()
    layer = layer._replace(key=layer.key[0], value=layer.value[0])
    h_BL = sum(
        jnp.where(seen_BLS, key_BSKA.sum((2, 3))[:, None], 0).sum(-1)
        for key_BSKA, _, seen_BLS in layer.parts(new, new)
    )
    return h_BL[..., None] % 1009, cache.extended((new[None], new[None]))


def toy_empty_cache(batch, size, window):
    return KVCache.empty(1, batch, size, CHUNK, 1, window, jnp.int32)


TOY = ChunkModel(
    latents=None,
    unfold=None,
    argmax_tokens=lambda x, prior: x[..., 0],
    advance=toy_advance,
    empty_cache=toy_empty_cache,
    fork=None,
    log_probs=None,
    prior=None,
)


def one_draw(tokens_BK, active_B) -> Sampled:
    active_B = jnp.asarray(active_B)
    return Sampled(tokens_BK, active_B.astype(jnp.int32), CHUNK * active_B, active_B)


def toy_next(h_BD, step, active_B):
    """The next chunk, a function of the checksum and the step; about one chunk in four has eos."""
    return one_draw((h_BD * jnp.arange(2, 2 + CHUNK) + step) % VOCAB, active_B)


def toy_continuation(prompt: list, num_chunks: int, window: int = 10**6) -> list:
    """The expected continuation of one row, straight from the definition, without a cache."""
    chunks, generated = list(prompt), []
    for step in range(num_chunks):
        first = max(0, len(chunks) - window)
        checksum = sum(
            token * weight_of(position, place)
            for position in range(first, len(chunks))
            for place, token in enumerate(chunks[position])
        )
        chunk = [(checksum % 1009 * factor + step) % VOCAB for factor in range(2, 2 + CHUNK)]
        generated.append(chunk)
        chunks.append(chunk)
        if EOS in chunk:
            break
    return generated


def ragged_prompts(rows: int = 12, longest: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Prompts of 1 to `longest` chunks; after a row's length there are random chunks, some with eos."""
    rng = np.random.default_rng(0)
    length_B = rng.integers(1, longest + 1, rows).astype(np.int32)
    length_B[:2] = longest, 1
    return rng.integers(0, VOCAB, (rows, longest, CHUNK)).astype(np.int32), length_B


@functools.partial(jax.jit, static_argnums=(3, 4))
def toy_prefill(prompt_BLK, length_B, window, size, piece) -> State:
    return decode.read_prompts(TOY, prompt_BLK, length_B, size, window, piece)


@functools.partial(jax.jit, static_argnums=(2, 3))
def toy_go_on(state, limit, num_chunks, next_chunk=toy_next):
    return decode.generate_chunks(TOY, state, limit, num_chunks, EOS, next_chunk)


def toy_generate(prompt_BLK, length_B, num_chunks=8, next_chunk=toy_next):
    state = toy_prefill(prompt_BLK, length_B, SIZE, SIZE, prompt_BLK.shape[1])
    return toy_go_on(state, num_chunks, num_chunks, next_chunk)


def num_generated(chunks: Sampled) -> list[int]:
    """For how many chunks each row was active; checks that they are the first ones."""
    active_BS = np.asarray(chunks.draws) > 0
    num_B = active_BS.sum(1)
    np.testing.assert_array_equal(active_BS, np.arange(active_BS.shape[1]) < num_B[:, None])
    return num_B.tolist()


def test_rows_with_prompts_of_different_lengths_continue_as_defined():
    prompt_BLK, length_B = ragged_prompts()
    state, chunks = toy_generate(prompt_BLK, length_B)
    assert chunks.tokens.shape == (12, 8, CHUNK)
    lengths = num_generated(chunks)
    for row in range(12):
        expected = toy_continuation(prompt_BLK[row, : length_B[row]].tolist(), 8)
        assert lengths[row] == len(expected)
        assert chunks.tokens[row, : len(expected)].tolist() == expected
        assert state.ended[row] == (EOS in expected[-1])
    # A control: rows end at different steps, and some do not end.
    assert len(set(lengths)) > 3 and not state.ended.all()


def test_the_next_chunk_is_traced_once():
    calls = []

    def counting(*arguments):
        calls.append(1)
        return toy_next(*arguments)

    toy_generate(*ragged_prompts(), next_chunk=counting)
    assert len(calls) == 1


def test_rows_continue_together_as_each_does_alone():
    prompt_BLK, length_B = ragged_prompts()
    _, together = toy_generate(prompt_BLK, length_B)
    for row in range(3):
        _, alone = toy_generate(prompt_BLK[row : row + 1, : length_B[row]], length_B[row : row + 1])
        (num,) = num_generated(alone)
        assert num == num_generated(together)[row]
        np.testing.assert_array_equal(alone.tokens[0, :num], together.tokens[row, :num])


def ends_at(last_steps: list[int], place: int = 0):
    """A `next_chunk` of ones, with eos at `place` in each row's chunk of its last step."""
    last_B = jnp.array(last_steps)

    def next_chunk(h_BD, step, active_B):
        is_eos_BK = (step == last_B)[:, None] & (jnp.arange(CHUNK) == place)
        return one_draw(jnp.where(is_eos_BK, EOS, 1), active_B)

    return next_chunk


@pytest.mark.parametrize("place", range(CHUNK))
def test_a_row_ends_with_the_chunk_that_holds_eos(place):
    """After it the row is not active, and nothing is drawn for it."""
    prompt_BLK, length_B = ragged_prompts(4)
    state, chunks = toy_generate(prompt_BLK, length_B, 6, ends_at([0, 3, 5, 99], place))
    assert num_generated(chunks) == [1, 4, 6, 6]
    assert chunks.tokens[1, :4, place].tolist() == [1, 1, 1, EOS]
    assert state.ended.tolist() == [True, True, True, False]
    assert state.step == 6


def test_generation_stops_once_every_row_has_ended():
    prompt_BLK, length_B = ragged_prompts(3)
    steps = []

    def counted(h_BD, step, active_B):
        jax.debug.callback(lambda step: steps.append(int(step)), step)
        return ends_at([0, 2, 1])(h_BD, step, active_B)

    state, chunks = toy_generate(prompt_BLK, length_B, 50, counted)
    jax.effects_barrier()
    assert sorted(steps) == [0, 1, 2]
    assert state.step == 3 and num_generated(chunks) == [1, 3, 2]


def test_eos_in_the_prompt_does_not_end_a_row():
    prompt_BLK = np.full((1, 2, CHUNK), EOS, np.int32)
    state, chunks = toy_generate(prompt_BLK, np.array([2], np.int32), 4, ends_at([99]))
    assert num_generated(chunks) == [4] and not state.ended.any()


def test_rows_that_a_caller_ended_are_not_active_and_other_rows_are_unchanged():
    prompt_BLK, length_B = ragged_prompts()
    _, expected = toy_generate(prompt_BLK, length_B)
    state = toy_prefill(prompt_BLK, length_B, SIZE, SIZE, 5)
    ended_B = jnp.arange(12) % 3 == 0
    state, chunks = toy_go_on(state._replace(ended=ended_B), 8, 8)
    assert not chunks.draws[ended_B].any() and state.ended[ended_B].all()
    lengths, before = num_generated(chunks), num_generated(expected)
    for row in np.flatnonzero(~ended_B):
        assert lengths[row] == before[row]
        np.testing.assert_array_equal(
            chunks.tokens[row, : lengths[row]], expected.tokens[row, : lengths[row]]
        )
    # When all rows have ended, no step is made.
    state, chunks = toy_go_on(state._replace(ended=jnp.ones(12, bool)), 8, 8)
    assert state.step == 8 and not chunks.draws.any()


@pytest.mark.parametrize("limits", [(3, 5), (1, 1, 6), (8,), (2, 2, 2, 2)])
def test_generation_in_several_calls_equals_one_call(limits):
    """State and chunks; each call stops at its `limit`."""
    prompt_BLK, length_B = ragged_prompts()
    state, expected = toy_generate(prompt_BLK, length_B)
    parts, ours = [], toy_prefill(prompt_BLK, length_B, SIZE, SIZE, 5)
    for limit in limits:
        before = int(ours.step)
        ours, chunks = toy_go_on(ours, limit, 8)
        assert ours.step == before + limit
        assert not np.asarray(chunks.draws)[:, limit:].any()  # beyond it nothing was generated
        parts.append(jax.tree.map(lambda x, limit=limit: x[:, :limit], chunks))
    jax.tree.map(np.testing.assert_array_equal, ours, state)
    together = jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *parts)
    jax.tree.map(np.testing.assert_array_equal, together, jax.device_get(expected))


@pytest.mark.parametrize("piece", [1, 2, 4, 8])
def test_a_prompt_read_in_pieces_gives_the_same_state_as_read_at_once(piece):
    prompt_BLK, length_B = ragged_prompts(longest=8)
    at_once = toy_prefill(prompt_BLK, length_B, SIZE, SIZE, 8)
    state = toy_prefill(prompt_BLK, length_B, SIZE, SIZE, piece)
    np.testing.assert_array_equal(state.h, at_once.h)
    np.testing.assert_array_equal(state.cache.length, length_B)
    (_, ours), (_, expected) = toy_go_on(state, 8, 8), toy_go_on(at_once, 8, 8)
    lengths = num_generated(expected)
    assert num_generated(ours) == lengths and len(set(lengths)) > 3
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(ours.tokens[row, :length], expected.tokens[row, :length])


@pytest.mark.parametrize(
    ("window", "size", "piece"),
    # The smallest cache allowed for a window, larger ones, and pieces of one chunk.
    [(3, 8, 4), (4, 8, 4), (5, 12, 4), (5, 16, 4), (4, 6, 2), (1, 2, 1), (7, 24, 8), (3, 64, 8)],
)
def test_a_sliding_context_continues_as_defined(window, size, piece):
    """With prompts and texts that are longer than the window and than the cache."""
    prompt_BLK, length_B = ragged_prompts(longest=24)
    assert size >= window + piece and length_B.min() < window + 1 and length_B.max() > window
    state = toy_prefill(prompt_BLK, length_B, window, size, piece)
    state, chunks = toy_go_on(state, 16, 16)
    lengths = num_generated(chunks)
    for row in range(12):
        prompt = prompt_BLK[row, : length_B[row]].tolist()
        expected = toy_continuation(prompt, 16, window)
        assert chunks.tokens[row, : lengths[row]].tolist() == expected
    # A control: with an unlimited window most rows would continue differently.
    whole = [
        toy_continuation(p[:n].tolist(), 16) for p, n in zip(prompt_BLK, length_B, strict=True)
    ]
    changed = [
        chunks.tokens[row, : len(other)].tolist() != other for row, other in enumerate(whole)
    ]
    assert sum(changed) > 6


# --- Draws


def bind_random(params, frozen):
    """The toy with random chunks: uniform over four chunks that depend on the hidden state."""

    def latents(h_PD, num_draws, key_P, noise_scale):
        draw = jax.vmap(lambda key: jax.random.randint(key, (num_draws, 1), 0, 4))(key_P)
        return draw + h_PD[:, None] % 50

    def unfold(latent_RZ):
        return (latent_RZ * jnp.arange(1, 1 + CHUNK))[..., None] % (VOCAB - 1)

    return dataclasses.replace(TOY, latents=latents, unfold=unfold)


def bind_uniform(params, frozen):
    """The toy with random chunks of one number below a million, independent of the context."""

    def latents(h_PD, num_draws, key_P, noise_scale):
        return jax.vmap(lambda key: jax.random.randint(key, (num_draws, 1), 0, 10**6))(key_P)

    def unfold(latent_RZ):
        return jnp.tile(latent_RZ, (1, CHUNK))[..., None]

    return dataclasses.replace(TOY, latents=latents, unfold=unfold)


def started(bind, prompt_BLK, length_B) -> State:
    piece = prompt_BLK.shape[1]
    return decode.prefill(
        bind, {}, {}, prompt_BLK, length_B, np.int32(SIZE), size=SIZE, piece=piece
    )


def gone_on(bind, state, key_B, limit=6, eos_id=EOS, temperature=1.0):
    config = sample_config(temperature=temperature).sampler_config
    return decode.decode(
        bind, {}, {}, state, key_B, np.int32(limit), num_chunks=6, eos_id=eos_id, config=config
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_rows_random_text_depends_only_on_its_own_key_and_prompt(temperature):
    prompt_BLK, length_B = ragged_prompts(3)
    key_B, other_key_B = jax.random.split(jax.random.key(0), (2, 3))

    def run(prompt_BLK, length_B, key_B):
        state = started(bind_random, prompt_BLK, length_B)
        _, chunks = gone_on(bind_random, state, key_B, temperature=temperature)
        return np.asarray(chunks.tokens)

    rows = run(prompt_BLK, length_B, key_B)
    turned = np.array([2, 0, 1])
    np.testing.assert_array_equal(
        run(prompt_BLK[turned], length_B[turned], key_B[turned]), rows[turned]
    )
    # Other neighbours, one of them with another length.
    prompt_BLK[1:] = 1
    length_B[1] = 4
    key_of_first_B = jnp.arange(3) == 0
    among_others = run(prompt_BLK, length_B, jnp.where(key_of_first_B, key_B, other_key_B))
    np.testing.assert_array_equal(among_others[0], rows[0])
    assert (among_others != rows)[1:].any((1, 2)).all()
    # Another key, the same prompt.
    assert (run(prompt_BLK, length_B, other_key_B)[0] != rows[0]).any()


def test_every_step_of_every_row_has_its_own_random_numbers():
    """18 draws of a million numbers: two are equal once in 6,500 seeds."""
    prompt_BLK, length_B = ragged_prompts(3)
    key_B = jax.random.split(jax.random.key(0), 3)
    state = started(bind_uniform, prompt_BLK, length_B)
    _, chunks = gone_on(bind_uniform, state, key_B, eos_id=-1)
    assert len(np.unique(np.asarray(chunks.tokens)[..., 0])) == 3 * 6
    # Steps are counted across calls: two chunks, then four more, are the same six.
    state, first = gone_on(
        bind_uniform, started(bind_uniform, prompt_BLK, length_B), key_B, limit=2, eos_id=-1
    )
    _, more = gone_on(bind_uniform, state, key_B, limit=4, eos_id=-1)
    parts = np.concatenate([first.tokens[:, :2], more.tokens[:, :4]], axis=1)
    np.testing.assert_array_equal(parts, chunks.tokens)


def test_rows_that_have_ended_do_not_make_the_others_read_a_longer_cache():
    """On CPUs every row costs as much as the one with the most chunks in its cache, so ended rows must have few."""
    prompt_BLK, length_B = ragged_prompts(3)
    key_B = jax.random.split(jax.random.key(0), 3)
    state = started(bind_random, prompt_BLK, length_B)
    cache = state.cache._replace(length=state.cache.length.at[1].set(SIZE))
    state = state._replace(cache=cache, ended=jnp.array([False, True, False]))
    state, chunks = gone_on(bind_random, state, key_B, limit=3, eos_id=-1)
    assert state.cache.length.tolist() == [length_B[0] + 3, 3, length_B[2] + 3]
    _, expected = gone_on(
        bind_random, started(bind_random, prompt_BLK, length_B), key_B, limit=3, eos_id=-1
    )
    for row in (0, 2):
        np.testing.assert_array_equal(chunks.tokens[row], expected.tokens[row])


def test_nothing_is_drawn_for_rows_that_have_ended():
    prompt_BLK, length_B = ragged_prompts(3)
    key_B = jax.random.split(jax.random.key(0), 3)
    for temperature, draws in ((1.0, 1), (0.4, 5)):
        state = started(bind_random, prompt_BLK, length_B)
        state = state._replace(ended=jnp.array([False, True, False]))
        _, chunks = gone_on(bind_random, state, key_B, temperature=temperature)
        assert chunks.draws.tolist() == [[draws] * 6, [0] * 6, [draws] * 6]
        assert not chunks.decoded[1].any() and not chunks.exact[1].any()


# --- A sliding context on a real model


def windowed_attention(window):
    """`attention.attend` over only the last `window` positions, by an explicit mask."""

    def attend(query, key, value, segment, choice):
        assert segment is None
        behind_TS = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
        mask_TS = (behind_TS >= 0) & (behind_TS < window)
        return jax.nn.dot_product_attention(
            query, key, value, mask=jnp.asarray(mask_TS)[None, None]
        )

    return attend


def full_forward(model, tokens_BLK):
    """Hidden states without a cache; jitted anew each time, so that patched attention is used."""
    return np.asarray(jax.jit(lambda tokens: model.advance(tokens, None)[0])(tokens_BLK))


def assert_close(ours, expected):
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def cached_forward(model, tokens_BLK, length_B, steps, size, window, piece):
    """Hidden states after each row's prompt and after each of `steps` more chunks, by the decode loop: [B, 1 + steps, D]."""

    def given(h_BD, step, active_B):
        at_B = length_B + step
        tokens_BK = jnp.take_along_axis(tokens_BLK, at_B[:, None, None], axis=1)[:, 0]
        # Returns the hidden states in place of `draws`.
        return Sampled(tokens_BK, h_BD, active_B, active_B)

    @jax.jit
    def run():
        prompt_BLK = tokens_BLK[:, :24]
        state = decode.read_prompts(model, prompt_BLK, length_B, size, window, piece)
        return decode.generate_chunks(model, state, steps + 1, steps + 1, -1, given)

    _, chunks = run()
    return np.asarray(chunks.draws)


LENGTHS = np.array([24, 1, 7, 8, 9, 17], np.int32)
STEPS = 12


def real_model():
    made = tiny()
    tokens_BLK = np.random.default_rng(0).integers(0, 256, (6, 24 + STEPS + 1, 4)).astype(np.int32)
    return made.task.bind(made.params, made.frozen), tokens_BLK


def states_of(h_BLD):
    """The hidden states from the end of each row's prompt on, [B, 1 + STEPS, D]."""
    return np.stack([h_BLD[row, n - 1 : n + STEPS] for row, n in enumerate(LENGTHS)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "size", "piece"),
    [pytest.param(8, 16, 8, marks=pytest.mark.slow), (5, 12, 4), (20, 32, 8)],
)
def test_a_sliding_cache_equals_a_full_forward_with_a_window(window, size, piece, monkeypatch):
    """Prompts longer than window and cache, read in pieces, and steps beyond the cache; positions keep counting."""
    model, tokens_BLK = real_model()
    ours = cached_forward(model, tokens_BLK, LENGTHS, STEPS, size, window, piece)
    unlimited = states_of(full_forward(model, tokens_BLK))
    monkeypatch.setattr(attention, "attend", windowed_attention(window))
    expected = states_of(full_forward(model, tokens_BLK))
    assert_close(ours, expected)
    # A control: an unlimited window gives other hidden states as soon as a chunk has left the window.
    for row, length in enumerate(LENGTHS):
        has_slid = np.arange(length, length + STEPS + 1) > window
        differs = np.abs(expected - unlimited)[row].max(-1) > 1e-3 * np.abs(expected).max()
        np.testing.assert_array_equal(differs, has_slid)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "piece"), [(64, 24), (40, 8)])
def test_a_window_over_the_whole_text_equals_the_full_forward(size, piece):
    model, tokens_BLK = real_model()
    ours = cached_forward(model, tokens_BLK, LENGTHS, STEPS, size, size, piece)
    assert_close(ours, states_of(full_forward(model, tokens_BLK)))


def test_the_compiled_loop_writes_into_the_cache_in_place():
    """No operation of a step writes as much as the keys of the cache; each chunk would move the whole cache otherwise."""
    made, rows, size = tiny(), 3, 512
    model = made.task.bind, made.params, made.frozen

    def fresh() -> State:
        prompt_BLK, length_B = np.zeros((rows, 16, 4), np.int32), np.ones(rows, np.int32)
        state = decode.prefill(*model, prompt_BLK, length_B, np.int32(size), size=16, piece=16)
        return decode.with_room(state, rows, size)

    state, key_B = jax.eval_shape(fresh), jax.random.split(jax.random.key(0), rows)
    options = {
        "num_chunks": 4,
        "eos_id": EOS,
        "config": sample_config(temperature=1.0).sampler_config,
    }
    compiled = decode.decode.lower(*model, state, key_B, np.int32(4), **options).compile()
    found = memory_traffic.operations(hlo.Program.of(compiled.as_text()))
    whole = state.cache.key.size * state.cache.key.dtype.itemsize
    assert {one.name: one.written for one in found if one.written >= whole} == {}
    # On a CPU each layer reads the cache in blocks.
    block = whole // made.config.lm.model.num_layers * kv_cache.BLOCK // size
    assert max(one.read for one in found) >= block


def test_every_key_of_the_sample_config_is_tested():
    """`BAD` has a value that is refused for every key but these; test_samplers.py has values for the first two, test_config.py for the last."""
    elsewhere = {"sampler", "temperature", "prompts"}
    assert {field.name for field in dataclasses.fields(SampleConfig)} == {*BAD, *elsewhere}
