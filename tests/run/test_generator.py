"""`Generator`: on a stand-in for a model that plays back scripts, and on a tiny model with random parameters."""

import dataclasses
import functools
import random
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_jax.data.tokenizers import ByteTokenizer
from calm_jax.errors import UserError
from calm_jax.models import attention
from calm_jax.models.kv_cache import KVCache
from calm_jax.run.continuous_batch import padded_length
from calm_jax.run.generator import Continuation, Generator
from calm_jax.run.workdir import Workdir
from calm_jax.sampling import decode
from calm_jax.sampling.chunk_model import ChunkModel
from tests.sampling.test_generation import windowed_attention
from tests.tiny_model import tiny

K = 4
TOKENIZER = ByteTokenizer(b"")
BOS, EOS, PAD = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id

# --- A model that plays back scripts
#
# The prompt of row r is one chunk, (r, r, r, r). The model continues it with the chunks of script r, where each place has
# CHOICES chunks of equal probability.

ROWS, PLACES, CHOICES = 8, 36, 4


def _latents(h_PD, num_draws, key_P, noise_scale):
    """The "latent" of a draw is (row, place, choice)."""
    choose = jax.vmap(lambda key: jax.random.randint(key, (num_draws, 1), 0, CHOICES))
    where_PN2 = jnp.broadcast_to(h_PD[:, None], (len(h_PD), num_draws, 2))
    return jnp.concatenate([where_PN2, choose(key_P)], axis=-1)


def _advance(tokens_BLK, cache):
    """The "hidden state" is (first token of the row, number of chunks after its first one)."""
    new = tokens_BLK[None, ..., None]
    longer = cache.extended((new, new))
    place_BL = cache.length[:, None] + jnp.arange(tokens_BLK.shape[1])
    row_BL = jnp.broadcast_to(longer.key[0, :, :1, 0, 0], place_BL.shape)
    return jnp.stack([row_BL, place_BL], axis=-1), longer


def _empty_cache(batch, size, window):
    return KVCache.empty(1, batch, size, K, 1, window, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Playback:
    """The task of that model. Its one parameter are the scripts, [ROWS, PLACES, CHOICES, K]."""

    chunk_size: int = K
    stacks: ClassVar[tuple] = ()

    def bind(self, params, frozen) -> ChunkModel:
        def unfold(latent_R3):
            row_R, place_R, choice_R = jnp.moveaxis(latent_R3, -1, 0)
            return params["scripts"][row_R, jnp.minimum(place_R, PLACES - 1), choice_R][..., None]

        return ChunkModel(
            _latents,
            unfold,
            lambda x, prior: x[..., 0],
            _advance,
            _empty_cache,
            fork=None,
            log_probs=None,
            prior=None,
        )


PLAYBACK = Playback()


def options(**changes):
    """Options for playing back scripts: one draw a chunk, as the tiny recipe has T = 1, and room for a whole script."""
    return dataclasses.replace(tiny().config.sample, **({"max_tokens": 4 * PLACES} | changes))


def playing(*scripts) -> Generator:
    """A model that continues the prompt of row r with `scripts[r]`.

    A script is text, bytes or a list of token ids, followed by zeros, or a list of lists: the choices of each chunk.
    """
    params = np.zeros((ROWS, PLACES, CHOICES, K), np.int32)
    for row, script in enumerate(scripts):
        if isinstance(script, list) and isinstance(script[0], list):
            for place, choices in enumerate(script):
                params[row, place] = np.resize(np.array(choices), (CHOICES, K))
            continue
        ids = list(script.encode() if isinstance(script, str) else script)
        ids += [0] * (PLACES * K - len(ids))
        params[row] = np.repeat(np.reshape(ids, (PLACES, 1, K)), CHOICES, axis=1)
    made = tiny()
    return Generator(PLAYBACK, {"scripts": jnp.asarray(params)}, {}, TOKENIZER, made.config)


def prompts_of(num: int = ROWS) -> list[list[int]]:
    return [[row] * K for row in range(num)]


def play(script, **changes) -> Continuation:
    """The continuation that plays back one script."""
    (one,) = playing(script).generate(prompts_of(1), options(**changes))
    return one


def streamed(generator, prompts, options, seed=0) -> list[tuple[Continuation, list[str]]]:
    """Each prompt's continuation and the pieces of its text."""
    pieces: dict[int, list[str]] = {index: [] for index in range(len(prompts))}
    done = {}
    for piece in generator.generate(prompts, options, seed, stream=True):
        one = piece.continuation
        pieces[one.index].append(piece.text)
        done[one.index] = one
    return [(done[index], pieces[index]) for index in range(len(prompts))]


def without_times(one: Continuation) -> dict:
    return {k: v for k, v in dataclasses.asdict(one).items() if k != "seconds"}


TEXT = "The quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 7, 8, 13])
def test_a_text_has_exactly_max_tokens_tokens(max_tokens):
    one = play(TEXT, max_tokens=max_tokens)
    assert one.text == TEXT[:max_tokens] and one.finish == "length"
    assert one.tokens == list(TEXT[:max_tokens].encode())
    assert one.chunk_ends == [min(4 * i, max_tokens) for i in range(1, -(-max_tokens // 4) + 1)]
    for values in (one.draws, one.decoded, one.exact, one.seconds):
        assert len(values) == len(one.chunk_ends)
    assert set(one.draws) == {1} and set(one.decoded) == {K} and all(one.exact)


@pytest.mark.parametrize("place", range(9))
def test_eos_ends_text_and_tokens_at_every_place_in_a_chunk(place):
    """Unlike the published code, which keeps the tokens after eos in that chunk."""
    script = list(TEXT.encode())
    script[place] = EOS
    one = play(script)
    assert one.finish == "eos" and one.text == TEXT[:place]
    assert one.tokens == list(TEXT[:place].encode())
    assert one.chunk_ends == [*range(4, place + 1, 4), place]


def test_eos_after_max_tokens_does_not_count():
    script = [*TEXT.encode()[:6], EOS]
    assert play(script, max_tokens=6).finish == "length"
    assert play(script, max_tokens=7).finish == "eos"


def test_pads_and_bos_are_tokens_without_text():
    one = play([65, PAD, BOS, 66, 67, EOS])
    assert one.text == "ABC" and one.tokens == [65, PAD, BOS, 66, 67]


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        # "The quick brown fox jumps over the lazy dog"
        (("quick",), "The ", 9),  # across two chunks
        (("qui",), "The ", 7),  # inside a chunk, whose last token is dropped
        (("T",), "", 1),
        (("e quick brown f",), "Th", 17),  # across many chunks
        (
            ("fox", "brown"),
            "The quick ",
            15,
        ),  # the first in the text counts, not the first in the list
        (
            ("k b", "quick b", "b"),
            "The ",
            11,
        ),  # the text ends when any is complete, before the earliest start of a complete one
        (("ick", "quick"), "The ", 9),  # both are complete at the same token
        (("dog",), "The quick brown fox jumps over the lazy ", 43),
        (("cat", "over"), "The quick brown fox jumps ", 30),
        (("o", "O"), "The quick br", 13),
    ],
)
def test_text_ends_before_a_stop_string_and_tokens_end_with_it(stop, text, num_tokens):
    one = play(TEXT, stop=stop)
    assert (one.text, one.finish) == (text, "stop")
    assert one.tokens == list(TEXT.encode()[:num_tokens])
    assert one.chunk_ends[-1] == num_tokens and len(one.chunk_ends) == -(-num_tokens // 4)


@pytest.mark.parametrize("first", range(K))
def test_the_stop_string_that_is_complete_first_ends_a_text_wherever_chunks_end(first):
    """A longer stop string around it, which the rest of the chunk would complete, does not count."""
    one = play("x" * first + "abab", stop=("abab", "ba"))
    assert one.tokens == list(b"x" * first + b"aba")
    assert one.text == "x" * first + "a"


def test_a_stop_string_that_does_not_occur_changes_nothing():
    one = play(TEXT, stop=("cat", "dogs", "xThe"), max_tokens=43)
    assert (one.text, one.finish) == (TEXT, "length")
    # The beginning of a stop string at the end of a text is part of the text.
    assert play(TEXT[:18], stop=("fox",), max_tokens=18).text == "The quick brown fo"


def test_a_stop_string_in_the_prompt_does_not_end_the_text():
    """Neither one in the prompt alone nor one that begins in the prompt and ends in the text."""
    row_a, row_b = [97] * K, [0] * K
    generator = playing("b")
    # A prompt of "aaaa" plays script 97; copies of one script stand for all of them.
    generator.params = jax.tree.map(lambda x: jnp.tile(x[:1], (98, 1, 1, 1)), generator.params)
    for prompt in (row_a, row_b):
        (one,) = generator.generate([prompt], options(stop=("ab", "a"), max_tokens=8))
        assert (one.text, one.finish) == ("b" + 7 * "\0", "length")


def test_a_stop_string_after_eos_or_max_tokens_does_not_count():
    script = [*b"abc", EOS, *b"stop"]
    assert play(script, stop=("stop",)).finish == "eos"
    assert play(b"abcdstop", stop=("stop",), max_tokens=7).finish == "length"
    assert play(b"abcdstop", stop=("stop",), max_tokens=8).finish == "stop"


def test_the_rows_of_a_batch_end_independently():
    scripts = [TEXT, [65, EOS], "a stop b", TEXT[::-1], [EOS], "xx stop"]
    done = playing(*scripts).generate(prompts_of(6), options(stop=("stop",), max_tokens=10))
    assert [one.index for one in done] == list(range(6))
    assert [one.finish for one in done] == ["length", "eos", "stop", "length", "eos", "stop"]
    assert [one.text for one in done] == [TEXT[:10], "A", "a ", TEXT[::-1][:10], "", "xx "]


def test_a_text_may_take_several_calls_of_the_compiled_loop():
    text = TEXT + TEXT[::-1] + TEXT
    assert len(text) > 4 * decode.CHUNKS_PER_CALL
    assert play(text, max_tokens=len(text)).text == text


@pytest.mark.slow
def test_no_more_chunks_are_generated_than_max_tokens_needs():
    """8 tokens need two chunks."""
    seen = []

    class Counting(Playback):
        def bind(self, params, frozen):
            model = Playback.bind(self, params, frozen)

            def argmax_tokens(x, prior):
                jax.debug.callback(lambda: seen.append(1))
                return model.argmax_tokens(x, prior)

            return dataclasses.replace(model, argmax_tokens=argmax_tokens)

    generator = Generator(Counting(), playing(TEXT).params, {}, TOKENIZER, tiny().config)
    for max_tokens, num_chunks in ((8, 2), (7, 2), (70, 18)):
        seen.clear()
        (one,) = generator.generate(prompts_of(1), options(max_tokens=max_tokens))
        jax.effects_barrier()
        assert len(one.tokens) == max_tokens
        assert len(seen) == num_chunks, max_tokens


# --- Streams


def test_a_stream_has_one_piece_for_each_chunk_and_their_sum_is_the_text():
    generator, options_ = playing(TEXT), options(max_tokens=13)
    ((one, pieces),) = streamed(generator, prompts_of(1), options_)
    assert pieces == ["The ", "quic", "k br", "o"]
    (plain,) = generator.generate(prompts_of(1), options_)
    assert without_times(one) == without_times(plain)
    assert one.seconds == sorted(one.seconds) and one.seconds[0] > 0


def test_a_piece_is_yielded_before_the_next_chunk_is_generated():
    pieces = playing(TEXT).generate(prompts_of(1), options(max_tokens=12), stream=True)
    first = next(pieces)
    assert (first.text, first.continuation.text, first.continuation.finish) == ("The ", "The ", "")
    assert first.continuation.tokens == list(b"The ")
    *_, last = pieces
    assert last.continuation is first.continuation and last.continuation.finish == "length"


def test_a_stream_withholds_what_may_become_a_stop_string():
    ((_, pieces),) = streamed(
        playing(TEXT), prompts_of(1), options(max_tokens=16, stop=("e quirk", "brown cat"))
    )
    assert pieces == ["Th", "e quic", "k ", "brown "]
    ((_, pieces),) = streamed(playing(TEXT), prompts_of(1), options(stop=("k brown",)))
    assert pieces == ["The ", "quic", "", ""]


def test_a_stream_withholds_an_incomplete_character():
    """Three bytes make a character, four a chunk."""
    text = "日本語のテキスト!"
    script = [*text.encode(), EOS]
    ((one, pieces),) = streamed(playing(script), prompts_of(1), options())
    assert pieces == ["日", "本", "語の", "テ", "キ", "スト", "!"]
    assert one.text == text


@pytest.mark.parametrize("first", range(K))
def test_a_stream_withholds_a_stop_string_of_multibyte_characters_byte_by_byte(first):
    """Where a chunk ends inside the second character of a stop string, the first one is withheld, too."""
    script = [*("x" * first + "aé日b").encode(), EOS]
    for stop in ("aé", "aé日", "日b"):
        ((one, pieces),) = streamed(playing(script), prompts_of(1), options(stop=(stop,)))
        assert "".join(pieces) == one.text == "x" * first + "aé日b".partition(stop)[0]


@pytest.mark.parametrize("text", ["日本語😀é", "é😀é😀", "aé日😀z"])
@pytest.mark.parametrize("first", range(4))
def test_no_piece_has_an_incomplete_character_wherever_chunks_end(text, first):
    text = "x" * first + text
    ((one, pieces),) = streamed(playing([*text.encode(), EOS]), prompts_of(1), options())
    assert "".join(pieces) == one.text == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "script",
    [
        b"ab\xe6\x97",  # an incomplete character at the end
        b"ab\xe6cd",  # never completed
        b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfcab",  # no characters at all, over two chunks
        b"abc\xe6\x97ab",
        "ab\ufffd\ufffd\ufffdcd".encode(),  # the replacement character itself
        b"abc\xf0\x9f\x98ab",
    ],
)
def test_a_stream_ends_with_replacement_characters_for_invalid_bytes(script):
    ((one, pieces),) = streamed(playing([*script, EOS]), prompts_of(1), options())
    assert "".join(pieces) == one.text == script.decode(errors="replace")


def test_an_incomplete_character_at_max_tokens_becomes_a_replacement_character():
    assert play("日本語", max_tokens=4).text == "日\ufffd"


def random_script(rng: random.Random) -> list[int]:
    """Letters, characters of two and three bytes, invalid bytes, and eos at a random place."""
    parts = [b"a", b"b", "é".encode(), "日".encode(), b"\xe6", b"\xff", b"\xa9"]
    weights = [6, 6, 4, 3, 1, 1, 1]
    ids = [byte for part in rng.choices(parts, weights, k=40) for byte in part][: PLACES * K]
    ids[rng.randrange(10, len(ids)) :] = [EOS]
    return ids


STOPS = [
    (),
    ("ab",),
    ("aab", "ba"),
    ("bbbb", "aé", "é日"),
    ("日a", "aé日"),
    ("éé", "abab", "日日"),
    ("ba", "abab"),
    ("aba", "bab", "aaaa", "éa"),
]


def expected_text(script: list[int], stop: tuple[str, ...], max_tokens: int) -> tuple[str, int]:
    """The text and its number of tokens by the definition, applied token by token."""
    ids = script[: min(script.index(EOS), max_tokens)]
    for size in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:size])
        if any(word in text for word in stop):
            return text[: min(text.index(word) for word in stop if word in text)], size
    return TOKENIZER.decode(ids), len(ids)


@pytest.mark.parametrize("stop", STOPS)
def test_texts_and_streams_agree_with_the_token_by_token_definition(stop):
    """On random scripts, 8 at a time. The pieces of a stream together are the text: none was shown too early."""
    rng = random.Random(0)
    ends = set()
    for max_tokens in (30, 31, 32, 80):
        scripts = [random_script(rng) for _ in range(ROWS)]
        chosen = options(stop=stop, max_tokens=max_tokens)
        generator = playing(*scripts)
        done = streamed(generator, prompts_of(), chosen)
        for script, (one, pieces) in zip(scripts, done, strict=True):
            text, num_tokens = expected_text(script, stop, max_tokens)
            assert (one.text, len(one.tokens)) == (text, num_tokens)
            assert one.tokens == script[:num_tokens]
            assert "".join(pieces) == text, (pieces, text)
            assert len(pieces) == len(one.chunk_ends)
            ends.add(one.finish)
        plain = generator.generate(prompts_of(), chosen)
        assert [without_times(one) for one in plain] == [without_times(one) for one, _ in done]
    assert ends >= ({"stop"} if stop else {"eos", "length"})


# --- Alignment


def test_incomplete_prompts_are_padded_as_asked_and_whole_ones_are_not():
    """The first token selects the script: with pads on the left it is the pad's, 258, else the prompt's, 7."""
    generator = playing("")
    rng = np.random.default_rng(0)
    scripts = rng.integers(0, 200, (259, PLACES, 1, K))
    generator.params = {"scripts": jnp.asarray(np.repeat(scripts, CHOICES, axis=2), jnp.int32)}
    for alignment, first in (("left", PAD), ("pad", 7)):
        chosen = options(prompt_alignment=alignment, max_tokens=4)
        begun, whole = generator.generate([[7, 8, 9], [7, 8, 9, 10]], chosen)
        assert begun.tokens == scripts[first, 0, 0].tolist() and begun.alignment == alignment
        assert whole.tokens == scripts[7, 0, 0].tolist() and whole.alignment == "whole"


@pytest.mark.slow
def test_match_continues_a_prompt_with_the_rest_of_a_draw_that_begins_like_its_last_chunk():
    """At least a quarter of the draws match. The prompt's own tokens are no part of the continuation."""
    choices = [list(b"abcd"), list(b"abef"), list(b"xyzw"), list(b"axbc")]
    script = [choices, [list(b"1234")], [list(b"5678")]]
    generator = playing(script, script)
    chosen = options(prompt_alignment="match", max_tokens=9, temperature=1.0)
    prompts = [
        [0] * K + [*b"xyz"],
        [0] * K + [*b"ab"],
        [1] * K + [*b"ax"],
        [0] * K,
    ]
    three, two, other, whole = generator.generate(prompts, chosen)
    assert three.text == "w12345678" and three.chunk_ends == [1, 5, 9]
    assert two.text in ("cd1234567", "ef1234567") and two.chunk_ends == [2, 6, 9]
    assert other.text == "bc1234567"
    assert [one.alignment for one in (three, two, other, whole)] == ["match"] * 3 + ["whole"]
    assert whole.text[4:] == "12345" and whole.match_draws == 0
    for one in (three, two, other):
        # A pool of 16 draws, and more if none of them matches, which happens for one prompt in a hundred.
        assert one.match_draws in (16, 32, 48) and one.draws == [one.match_draws, 1, 1]
        assert one.decoded[0] == K * one.match_draws and all(one.exact)


@pytest.mark.slow
def test_match_sharpens_the_law_of_completions_below_temperature_1():
    """Given "ab", `abcd` is twice as likely as `abef`, so 4 to 1 at T = 1/2. The chunk counts as approximate."""
    choices = [list(b"abcd"), list(b"abcd"), list(b"abef"), list(b"xyzw")]
    generator = playing([choices])
    chosen = options(prompt_alignment="match", max_tokens=2, temperature=0.5, batch_size=64)
    prompts = [[0] * K + [*b"ab"]] * 512
    done = generator.generate(prompts, chosen)
    assert {one.alignment for one in done} == {"match"} and {one.finish for one in done} == {
        "length"
    }
    assert not any(one.exact[0] for one in done)
    share = np.mean([one.text == "cd" for one in done])
    # The probability is 0.8 (at T = 1: 2/3). The bound is 5 standard errors of 0.0177, one false alarm in a million, and 0.01 for
    # the bias of a pool of 48.
    assert abs(share - 0.8) < 5 * 0.0177 + 0.01
    assert share > 2 / 3 + 0.03


@pytest.mark.slow
def test_a_text_may_end_in_the_chunk_that_match_completes():
    """With eos, a stop string or max_tokens in it, nothing more is generated."""
    script = [[[97, 98, EOS, 99]], [list(b"1234")]]
    generator = playing(script, [[list(b"abcd")], [list(b"1234")]])
    prompts = [[0] * K + [97], [1] * K + [97], [1] * K + [*b"abc"]]
    chosen = options(prompt_alignment="match", max_tokens=2, stop=("cd",), temperature=1.0)
    ended, stopped, going = generator.generate(prompts, chosen)
    assert (ended.text, ended.finish, ended.chunk_ends) == ("b", "eos", [1])
    # max_tokens=2 cuts "bcd".
    assert (stopped.text, stopped.finish, stopped.tokens) == ("bc", "length", [*b"bc"])
    assert (going.text, going.finish, going.tokens) == ("d1", "length", [*b"d1"])
    chosen = dataclasses.replace(chosen, max_tokens=3)
    assert [one.finish for one in generator.generate(prompts, chosen)] == ["eos", "stop", "length"]
    (alone,) = generator.generate(prompts[:1], chosen)
    assert alone.text == "b" and alone.chunk_ends == [1]


@pytest.mark.slow
def test_match_pads_on_the_left_where_no_draw_matches():
    """No draw of 48 matches the first prompt; the second is shorter than a chunk, so there is no state to draw from."""
    generator = playing([[list(b"abcd")]])
    chosen = options(prompt_alignment="match", max_tokens=4)
    begun, short = generator.generate([[0] * K + [*b"zz"], [0] * 2], chosen)
    (left,) = generator.generate(
        [[0] * K + [*b"zz"]], options(prompt_alignment="left", max_tokens=4)
    )
    assert (begun.alignment, short.alignment) == ("left", "left")
    assert begun.match_draws == 48 and short.match_draws == 0
    assert begun.text == left.text and begun.tokens == left.tokens
    assert len(begun.tokens) == len(short.tokens) == 4
    assert len(begun.draws) == 1  # draws that did not match are no chunk


# --- A tiny model with random parameters

LENGTH = 27
PROMPTS = ["def f(x):\n", "", "class", "é 日本", "import os, sys, re", "a", "return None  # why"]


def generate(prompts=PROMPTS, made=None, seed=0, **changes) -> list[Continuation]:
    generator = (made or tiny()).generator()
    return generator.generate(prompts, dataclasses.replace(generator.options, **changes), seed)


@functools.cache
def reference(temperature=1.0, **changes) -> list[Continuation]:
    """All prompts together."""
    return generate(max_tokens=LENGTH, temperature=temperature, sampler="batch", **changes)


def assert_same_texts(ours, expected):
    assert [one.tokens for one in ours] == [one.tokens for one in expected]
    assert [one.text for one in ours] == [one.text for one in expected]
    assert [one.draws for one in ours] == [one.draws for one in expected]


@pytest.mark.slow
def test_random_texts_differ():
    """The tests below mean nothing unless texts differ between prompts and seeds, and tokens within a text."""
    texts = [tuple(one.tokens) for one in reference()]
    assert len(set(texts)) == len(PROMPTS)
    assert min(len(set(text)) for text in texts) > 4
    other = generate(max_tokens=LENGTH, temperature=1.0, seed=1)
    assert not set(texts) & {tuple(one.tokens) for one in other}
    assert_same_texts(generate(max_tokens=LENGTH, temperature=1.0), reference())


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_texts_do_not_depend_on_the_batch_size(batch_size):
    assert_same_texts(
        generate(max_tokens=LENGTH, temperature=1.0, batch_size=batch_size), reference()
    )


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_text_depends_on_its_prompt_and_place_and_not_on_other_prompts(temperature):
    """The other prompts become longer, shorter or fewer."""
    expected = reference(temperature)
    kept = {0, 3, 5}
    others = [
        prompt if index in kept else prompt[::-1] + "x" * (3 * index)
        for index, prompt in enumerate(PROMPTS)
    ]
    ours = generate(others, max_tokens=LENGTH, temperature=temperature, sampler="batch")
    assert_same_texts([ours[i] for i in kept], [expected[i] for i in kept])
    assert all(ours[i].tokens != expected[i].tokens for i in set(range(len(PROMPTS))) - kept)
    # Fewer other prompts.
    assert_same_texts(
        generate(PROMPTS[:4], max_tokens=LENGTH, temperature=temperature, sampler="batch"),
        expected[:4],
    )
    # The same prompt at two places has two texts.
    again = generate([PROMPTS[1]] * 4, max_tokens=LENGTH, temperature=temperature, sampler="batch")
    assert len({tuple(one.tokens) for one in again}) == 4
    assert again[1].tokens == expected[1].tokens


@pytest.mark.slow
def test_a_shorter_text_is_the_beginning_of_a_longer_one():
    short = generate(max_tokens=10, temperature=1.0)
    for one, longer in zip(short, reference(), strict=True):
        assert one.tokens == longer.tokens[:10]


def test_a_stream_gives_the_same_texts_as_a_call():
    made = tiny()
    generator = made.generator()
    chosen = dataclasses.replace(generator.options, max_tokens=LENGTH, temperature=1.0)
    done = streamed(generator, PROMPTS, chosen)
    assert_same_texts([one for one, _ in done], reference())
    for one, pieces in done:
        assert "".join(pieces) == one.text and len(pieces) == len(one.chunk_ends)


def test_bos_is_put_before_text_prompts_and_not_before_token_ids():
    ids = [[BOS, *prompt.encode()] for prompt in PROMPTS]
    assert_same_texts(generate(ids, max_tokens=LENGTH, temperature=1.0), reference())
    assert_same_texts(
        generate([np.array(one) for one in ids], max_tokens=LENGTH, temperature=1.0), reference()
    )
    # Without bos it is another prompt, unless it is empty, which means bos alone.
    without = generate([one[1:] for one in ids], max_tokens=LENGTH, temperature=1.0)
    same = [a.tokens == b.tokens for a, b in zip(without, reference(), strict=True)]
    assert same == [prompt == "" for prompt in PROMPTS]


def test_no_prompts_give_no_texts():
    assert generate([]) == []


@pytest.mark.slow
def test_calls_of_similar_lengths_share_a_compiled_program():
    """With other prompts, max_tokens, stop strings and seeds, streamed or not."""
    generator = tiny().generator()
    base = dataclasses.replace(generator.options, max_tokens=20, temperature=0.5, sampler="batch")
    generator.generate(PROMPTS, base)
    compiled = decode.prefill._cache_size(), decode.decode._cache_size()
    for prompts, changes in (
        (PROMPTS[::-1], {}),
        (["x" * 50, *PROMPTS[1:]], {}),
        (PROMPTS, {"max_tokens": 1}),
        (PROMPTS, {"max_tokens": 64}),
        (PROMPTS, {"stop": ("x", "yz")}),
        (PROMPTS, {"prompt_alignment": "pad"}),
        ([[7] * 64] * len(PROMPTS), {}),
    ):
        chosen = dataclasses.replace(base, **changes)
        generator.generate(prompts, chosen, seed=len(prompts[0]))
        for _ in generator.generate(prompts, chosen, stream=True):
            pass
        now = decode.prefill._cache_size(), decode.decode._cache_size()
        assert now == compiled, changes
    # The count does rise for another shape, a prompt of more than 16 chunks.
    generator.generate([[7] * 65] * len(PROMPTS), base)
    assert decode.prefill._cache_size() == compiled[0] + 1


def test_padded_lengths_are_powers_of_two_from_8_on():
    lengths = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 33: 64, 100: 128, 128: 128}
    assert {length: padded_length(length) for length in lengths} == lengths


# --- Long texts


@pytest.mark.slow
def test_a_text_beyond_the_context_is_refused_in_one_line():
    """The context is 8 chunks. Prompt and continuation are each rounded up to whole chunks."""
    generator = tiny("k=4", 32).generator()
    chosen = dataclasses.replace(generator.options, max_tokens=9, temperature=1.0)
    assert generator.max_chunks == 8
    (one,) = generator.generate([[7] * 20], chosen)
    assert len(one.tokens) <= 9
    for prompts, index, length in (([[7] * 21], 0, 21), (["", "x" * 30], 1, 31)):
        for stream in (False, True):  # a stream must refuse before its first piece is asked for
            with pytest.raises(UserError) as caught:
                generator.generate(prompts, chosen, stream=stream)
            message = str(caught.value)
            assert "\n" not in message
            assert message.startswith(f"prompt {index} has {length} tokens; with max_tokens=9")
            assert "context is 8" in message and "long_context=slide" in message


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_sliding_context_gives_the_tokens_of_full_forward_passes_with_windowed_attention(
    stream, monkeypatch
):
    """Greedy tokens of a baseline, for prompts and texts longer than its context of 32 tokens."""
    made = tiny("head=softmax", 32)
    generator = made.generator()
    chosen = dataclasses.replace(
        generator.options, max_tokens=50, temperature=0.0, long_context="slide"
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, size).tolist() for size in (75, 3, 32, 33)]
    if stream:
        done = [one for one, _ in streamed(generator, prompts, chosen)]
    else:
        done = generator.generate(prompts, chosen)
    window = 32

    def greedy_tokens():
        @jax.jit
        def run(tokens_BLK):
            model = made.task.bind(made.params, {})
            h_BLD, _ = model.advance(tokens_BLK, None)
            return jax.vmap(model.log_probs)(h_BLD).argmax(-1)

        tokens_BL = np.zeros((4, 125), np.int32)
        for row, one in enumerate(done):
            text = [*one.prompt, *one.tokens]
            tokens_BL[row, : len(text)] = text
        return np.asarray(run(tokens_BL[..., None]))

    plain = greedy_tokens()
    monkeypatch.setattr(attention, "attend", windowed_attention(window))
    windowed = greedy_tokens()
    differs = []
    for row, one in enumerate(done):
        first, num = len(one.prompt) - 1, len(one.tokens)
        expected = windowed[row, first : first + num].tolist()
        assert one.tokens == expected
        if one.finish == "eos":
            assert windowed[row, first + num] == EOS
        else:
            assert (one.finish, num) == ("length", 50)
        differs.append(plain[row, first : first + num].tolist() != expected)
    assert any(differs) and max(len(one.tokens) for one in done) > window


@pytest.mark.slow
def test_a_text_that_fits_the_context_is_the_same_beside_one_that_slides():
    """And long_context="slide" changes nothing where all texts fit."""
    made = tiny("k=4", 32)
    slide = {"made": made, "max_tokens": 9, "temperature": 1.0, "long_context": "slide"}
    short = PROMPTS[:3]
    expected = generate(short, **slide | {"long_context": "refuse"})
    assert_same_texts(generate(short, **slide), expected)
    beside = generate([*short, "x" * 100], **slide)
    assert_same_texts(beside[:3], expected)
    # Two prompts with the same last 8 chunks, the context, have the same text.
    long = [[5] * 40 + list(range(64)), [9] * 40 + list(range(64))]
    one, other = (generate([ids], **slide | {"max_tokens": 4})[0] for ids in long)
    assert one.tokens == other.tokens


# --- Refusals and reports


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        (["a", [0, 259]], {}, "prompt 1: token id 259 is not in the vocabulary, [0, 259)"),
        ([[-1]], {}, "prompt 0: token id -1 is not in the vocabulary"),
        (["a", "b\udcff"], {}, r"prompt 1, 'b\udcff', is not valid Unicode text"),
        (["a"], {"temperature": 0.0}, "temperature=0 must be in (0, 1]"),
        (["a"], {"temperature": 1.5}, "temperature=1.5 must be in (0, 1]"),
        (["a"], {"top_p": 0.5}, "top_p=0.5 needs the probabilities of tokens"),
        (
            ["a"],
            {"temperature": 0.7, "sampler": "published"},
            "temperature=0.7: sampler='published'",
        ),
        (["a"], {"temperature": 0.2, "max_draws": 4}, "max_draws=4 must be at least 5"),
        (
            ["a"],
            {"temperature": 0.4, "max_draws": 2, "sampler": "rejection"},
            "max_draws=2 must be at least 3",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts_and_options_are_refused_before_anything_is_computed(
    prompts, changes, message, stream
):
    generator = tiny().generator()
    generator.params = None  # any computation would fail
    chosen = dataclasses.replace(generator.options, **changes)
    with pytest.raises(UserError) as caught:
        generator.generate(prompts, chosen, stream=stream)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(UserError, match=f"seed={seed} must be in"):
        tiny().generator().generate(["a"], seed=seed)


@pytest.mark.slow
def test_a_baseline_supports_temperatures_of_0_and_above_1_and_top_p():
    made = tiny("head=softmax")
    hot, cut = (
        generate(PROMPTS[:3], made=made, max_tokens=9, **changes)
        for changes in ({"temperature": 2.0}, {"temperature": 2.0, "top_p": 1e-6})
    )
    greedy = generate(PROMPTS[:3], made=made, max_tokens=9, temperature=0.0, seed=5)
    assert_same_texts(cut, greedy)
    assert [one.text for one in hot] != [one.text for one in greedy]
    assert not any(one.alignment != "whole" for one in hot)


def test_the_description_counts_draws_approximate_chunks_and_alignments():
    generator = tiny().generator()

    def described(**changes):
        chosen = dataclasses.replace(generator.options, **changes)
        return generator.describe(done, chosen)

    done = [
        Continuation(0, "a", draws=[16, 48], exact=[True, False]),
        Continuation(1, "b", draws=[48, 1], exact=[False, True], alignment="match", match_draws=48),
        Continuation(2, "c", draws=[7], exact=[True], alignment="left", match_draws=32),
    ]
    assert described(temperature=1.0) == "temperature 1, 1 draw a chunk with every sampler"
    assert described(temperature=0.5, sampler="growing") == (
        "temperature 0.5, sampler growing: 24 draws a chunk, 2 of 5 chunks not exact"
    )
    assert described(temperature=0.33, sampler="noise") == (
        "temperature 0.33, sampler noise: 1 draw a chunk"
    )
    assert described(temperature=1.0, prompt_alignment="match") == (
        "temperature 1, 1 draw a chunk with every sampler, prompts: 1 of whole chunks, 1 completed by matching draws, "
        "1 padded on the left, 80 draws"
    )
    done = []
    assert described(temperature=0.5) == "temperature 0.5"
    baseline = tiny("head=softmax").generator()
    chosen = dataclasses.replace(baseline.options, temperature=0.3, top_p=0.9)
    assert baseline.describe([], chosen) == "temperature 0.3, top_p 0.9"


@pytest.mark.slow
def test_draws_and_exactness_are_reported_as_the_sampler_counts_them():
    """The sampler "batch" takes 8 draws a chunk and is never exact; "pooled" takes at most 48."""
    for one in reference(0.5):
        assert set(one.draws) == {8} and not any(one.exact)
        assert all(count >= 8 for count in one.decoded)
    for one in generate(PROMPTS[:3], max_tokens=8, temperature=0.5, sampler="pooled"):
        assert all(count in (16, 48) for count in one.draws)
        assert all(exact or count == 48 for count, exact in zip(one.draws, one.exact, strict=True))


# --- From a workdir


@pytest.mark.slow
def test_a_loaded_generator_gives_the_texts_of_the_stored_model(tmp_path):
    made = tiny()
    made.save(tmp_path)
    loaded = Generator.load(tmp_path)
    assert loaded.options == made.config.sample and loaded.max_chunks == 64
    chosen = dataclasses.replace(loaded.options, max_tokens=LENGTH, temperature=1.0)
    assert_same_texts(loaded.generate(PROMPTS, chosen), reference())


@pytest.mark.slow
def test_a_workdir_without_a_trained_model_is_named(tmp_path):
    made = tiny()
    with pytest.raises(UserError, match="is no workdir"):
        Generator.load(tmp_path)
    made.tokenizer.save(tmp_path / "tokenizer")
    Workdir(tmp_path).store_config(made.config)
    with pytest.raises(UserError, match="lm holds no checkpoint: train first"):
        Generator.load(tmp_path)
