"""The server, over real connections: with OpenAI's client, with many clients, and with what no client should send."""

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import pathlib
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import openai
import pytest
import uvicorn

from calm_jax.cli.signals import EXIT_INTERRUPTED
from calm_jax.run.generator import Generator
from calm_jax.sampling.decode import CHUNKS_PER_CALL
from calm_jax.serve import app
from calm_jax.serve.request import Limits
from tests import workdirs
from tests.tiny_model import tiny
from tests.workdirs import wait_until

LIMITS = Limits(
    prompt_tokens=100,
    max_tokens=64,
    texts=8,
    draws=64,
    waiting=500,
    body_bytes=10_000,
    seconds=300,
)
# One draw a chunk, and few tokens.
FAST = {"temperature": 1.0, "max_tokens": 10}
WAIT_SECONDS = 60


@contextlib.contextmanager
def serving(
    generator: Generator, limits: Limits = LIMITS, num_places: int = 4, **others: Generator
) -> Iterator[int]:
    """The port of a server in a thread of this process; it ends as it does after SIGTERM. `others`: more models."""
    models = {
        name: app.Served(one, num_places, limits)
        for name, one in {"tiny": generator, **others}.items()
    }
    served = app.make_app(models, app.LOOPBACK_NAMES)
    listener = socket.create_server(("127.0.0.1", 0))
    # Of the connections, too: little fits into the buffers of a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    config = uvicorn.Config(served, http="h11", ws="none", lifespan="on", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(tiny().generator()) as number:
        yield number


def client(port: int) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300
    )


def send(port: int, body, path="/v1/completions", method="POST", **headers):
    """Status, headers and parsed body of one request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
        answer = connection.getresponse()
        text = answer.read()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, answer.headers, json.loads(text) if is_json else text.decode()
    finally:
        connection.close()


def expected(prompts, seed=0, generator=None, **changes):
    generator = generator or tiny().generator()
    options = dataclasses.replace(generator.options, **changes)
    return generator.generate(prompts, options, seed)


def assert_same(choices, texts):
    """The answer's choices are what `Generator.generate` gives."""
    assert [choice.index for choice in choices] == list(range(len(texts)))
    for choice, one in zip(choices, texts, strict=True):
        assert choice.text == one.text
        assert choice.finish_reason == ("length" if one.finish == "length" else "stop")
        ours = {name: x for name, x in choice.calm.items() if name != "seconds"}
        assert ours == {name: getattr(one, name) for name in ours} and len(ours) == 8
        assert len(choice.calm["seconds"]) == len(one.seconds)


# --- What a client gets


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("def f(x):", ["def f(x):"]),
        ([256, 100, 101], [[256, 100, 101]]),
        (["a", "", "é 日本"], ["a", "", "é 日本"]),
        ([[1, 2, 3, 4, 5], [6]], [[1, 2, 3, 4, 5], [6]]),
    ],
)
def test_a_completion_is_what_the_generator_gives(port, prompt, prompts):
    for changes in ({}, {"temperature": 0.5}):
        options = FAST | changes
        texts = expected(prompts, 7, **options)
        done = client(port).completions.create(model="tiny", prompt=prompt, seed=7, **options)
        assert_same(done.choices, texts)
        assert done.calm == {"seed": 7}
        counts = tiny().generator().rows(prompts, tiny().config.sample, 0)
        usage = sum(len(row.ids) for row in counts), sum(len(one.tokens) for one in texts)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == usage
        assert done.usage.total_tokens == sum(usage)


@pytest.mark.slow
def test_several_texts_of_a_prompt_and_calms_own_options(port):
    more = {"sampler": "batch", "num_candidates": 5, "prompt_alignment": "pad"}
    options = {"temperature": 0.5, "max_tokens": 9}
    done = client(port).completions.create(
        model="tiny", prompt=["a", "b"], n=3, seed=1, extra_body=more, **options
    )
    texts = expected(["a"] * 3 + ["b"] * 3, 1, **options, **more)
    assert_same(done.choices, texts)
    assert {draws for one in texts for draws in one.draws} == {5}
    # A prompt counts once, whatever n is: each is bos and a byte.
    assert done.usage.prompt_tokens == 4
    assert len({choice.text for choice in done.choices}) > 3


@pytest.mark.slow
def test_a_text_ends_before_a_stop_string_and_without_a_seed_texts_differ(port):
    ask = client(port).completions.create
    whole = ask(model="tiny", prompt="a", seed=0, **FAST).choices[0]
    stop = whole.text[1]
    for words in (stop, ["zz", stop]):
        done = ask(model="tiny", prompt="a", seed=0, stop=words, **FAST).choices[0]
        assert done.text == whole.text[: whole.text.index(stop)]
        assert (done.finish_reason, done.calm["finish"]) == ("stop", "stop")
    one, other = (ask(model="tiny", prompt="a", **FAST) for _ in range(2))
    assert one.calm["seed"] != other.calm["seed"]
    again = ask(model="tiny", prompt="a", seed=one.calm["seed"], **FAST)
    assert again.choices[0].text == one.choices[0].text


@pytest.mark.slow
def test_a_stream_has_an_event_for_each_chunk(port):
    texts = expected(["a b", "c"], 3, **FAST)
    parts: dict[int, list] = {0: [], 1: []}
    stream = client(port).completions.create(
        model="tiny",
        prompt=["a b", "c"],
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        **FAST,
    )
    *events, last = stream
    for event in events:
        (choice,) = event.choices
        parts[choice.index].append(choice)
    for index, one in enumerate(texts):
        assert "".join(part.text for part in parts[index]) == one.text
        assert [token for part in parts[index] for token in part.calm["tokens"]] == one.tokens
        for name in ("draws", "decoded", "exact"):
            assert [part.calm[name] for part in parts[index]] == getattr(one, name)
        assert [part.finish_reason for part in parts[index]] == [None, None, "length"]
    assert not last.choices and last.usage.completion_tokens == 20
    status, headers, text = send(port, {"prompt": "a", "stream": True, "seed": 0} | FAST)
    assert status == 200 and headers["Content-Type"].startswith("text/event-stream")
    *lines, end, rest = text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "") and len(lines) == 3
    assert all(json.loads(line.removeprefix("data: "))["model"] == "tiny" for line in lines)


@pytest.mark.slow
def test_of_fifty_requests_at_once_none_is_lost_and_each_is_as_if_alone(port):
    """With two samplers, streams among them, in four places."""
    rng = random.Random(0)
    asked = []
    for number in range(50):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 30))]
        options = {
            "temperature": rng.choice([1.0, 1.0, 1.0, 0.5]),
            "max_tokens": rng.randrange(12, 30),
        }
        asked.append((prompt, number, options, number % 3 == 0))

    def ask(prompt, seed, options, stream):
        done = client(port).completions.create(
            model="tiny", prompt=prompt, seed=seed, stream=stream, **options
        )
        events = done if stream else [done]
        return tuple(token for event in events for token in event.choices[0].calm["tokens"])

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(lambda one: ask(*one), asked))
    generator = tiny().generator()
    for text, (prompt, seed, options, _) in zip(texts, asked, strict=True):
        (one,) = expected([prompt], seed, generator, **options)
        assert text == tuple(one.tokens)
    assert len(set(texts)) > 45


@pytest.mark.slow
def test_models_health_and_metrics(port):
    (listed,) = client(port).models.list()
    assert listed.id == "tiny" and client(port).models.retrieve("tiny") == listed
    with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
        client(port).models.retrieve("other")
    assert send(port, b"", "/health", "GET")[::2] == (200, {"status": "ok"})

    def count(name):
        _, _, text = send(port, b"", "/metrics", "GET")
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    names = ("calm_requests_total", "calm_generated_tokens_total", "calm_draws_total")
    before = [count(name) for name in names]
    send(port, {"prompt": "a", "seed": 0} | FAST)
    assert [count(name) for name in names] == [
        a + b for a, b in zip(before, (1, 10, 3), strict=True)
    ]
    before = count("calm_prompt_tokens_total")
    send(port, {"prompt": "a", "seed": 0, "n": 3} | FAST)
    assert count("calm_prompt_tokens_total") == before + 2  # bos and a byte, once for all texts
    send(port, {"prompt": "a", "seed": -1})
    assert count('calm_requests_total{status="400"}') >= 1
    assert (count("calm_texts_running"), count("calm_texts_waiting")) == (0, 0)


def test_the_page_needs_no_network_and_its_script_finds_its_elements(port):
    status, headers, page = send(port, b"", "/", "GET")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "://" not in page and "<script src" not in page and '<link rel="stylesheet' not in page
    used = set(re.findall(r'\$\("(\w+)"\)', page))
    assert used and used <= set(re.findall(r'id="(\w+)"', page))
    ranges = re.search(r"RANGES = \[(.*?)\]", page)[1]
    (model,) = send(port, b"", "/v1/models", "GET")[2]["data"]
    assert "shown_candidates" in model["calm"]["options"]
    for name in [*re.findall(r'"(\w+)"', ranges), "sampler"]:
        assert f'id="{name}"' in page and name in model["calm"]["options"]
    for name in re.findall(r"calm\.limits\.(\w+)", page):
        assert name in model["calm"]["limits"]


# --- What no client should send

DEEP = b'{"prompt": ' + 4000 * b"[" + 4000 * b"]" + b"}"


@pytest.mark.parametrize(
    "body, message",
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b'{"prompt": "a"', "the body is not JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "the body is not JSON: NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "the body is not JSON: -Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature=Infinity must be a finite number"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "a number has 5000 digits"),
        (DEEP, ""),
        (b'{"prompt": "\\ud800"}', "prompt 0, '\\ud800', is not valid Unicode text"),
        ([], "the body must be a JSON object"),
        ({}, "prompt is missing"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": []}, "prompt is an empty list"),
        ({"prompt": [[]]}, None),
        ({"prompt": [True]}, "prompt must be text"),
        ({"prompt": [1.0]}, "prompt must be text"),
        ({"prompt": ["a", 1]}, "prompt must be text"),
        ({"prompt": {"a": 1}}, "prompt must be text"),
        ({"prompt": [-1]}, "prompt 0: token id -1 is not in the vocabulary"),
        ({"prompt": [10**40]}, "prompt 0: token id 1000"),
        ({"prompt": "a" * 200}, "prompt 0 has 201 tokens; at most 100"),
        # A prompt counts once, whatever n is.
        ({"prompt": ["a", "a" * 200], "n": 3}, "prompt 1 has 201 tokens; at most 100"),
        ({"prompt": [[5], [-1]], "n": 3}, "prompt 1: token id -1 is not in the vocabulary"),
        ({"prompt": ["a"] * 9}, "9 prompts with n=1: at most 8 texts can be asked for here"),
        ({"prompt": "a", "n": 0}, "n=0 must be at least 1"),
        ({"prompt": "a", "n": 10**30}, "1 prompt with n=1000"),
        ({"prompt": "a", "n": "2"}, 'n="2" must be a whole number'),
        ({"prompt": "a", "n": True}, "n=true must be a whole number"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens=-5 must be at least 1"),
        ({"prompt": "a", "max_tokens": 65}, "max_tokens=65 must be at most 64"),
        ({"prompt": "a", "max_tokens": 5.0}, "max_tokens=5.0 must be a whole number"),
        ({"prompt": "a", "temperature": 0}, "temperature=0 must be in (0, 1]"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1 must be in (0, 1]: draws"),
        ({"prompt": "a", "temperature": 10**400}, "temperature=1e+09 must be in (0, 1]"),
        ({"prompt": "a", "temperature": "1/2"}, 'temperature="1/2" must be a finite number'),
        ({"prompt": "a", "top_p": 0.9}, "top_p=0.9 needs the probabilities of tokens"),
        ({"prompt": "a", "top_p": 0}, "top_p=0 must be in (0, 1]"),
        ({"prompt": "a", "seed": -1}, "seed=-1 must be in [0, 2**32)"),
        ({"prompt": "a", "seed": 2**32}, "seed=4294967296 must be in [0, 2**32)"),
        ({"prompt": "a", "seed": 1.5}, "seed=1.5 must be a whole number"),
        ({"prompt": "a", "user": 7}, "user=7 must be a string"),
        ({"prompt": "a", "stop": ""}, "stop='' would end every text"),
        ({"prompt": "a", "stop": [1]}, "stop must be made of strings"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop must be a string or a list of up to 16"),
        ({"prompt": "a", "stop": "a" * 257}, "stop must be made of strings of up to 256"),
        ({"prompt": "a", "stop": {"a": 1}}, "stop must be a string or a list"),
        ({"prompt": "a", "stream": "yes"}, 'stream="yes" must be true or false'),
        ({"prompt": "a", "stream_options": 1}, "stream_options=1 must be an object"),
        (
            {"prompt": "a", "stream_options": {"usage": 1}},
            "stream_options has the unknown field 'usage'",
        ),
        ({"prompt": "a", "sampler": "best"}, "sampler='best' is none of"),
        ({"prompt": "a", "max_draws": 65}, "max_draws=65 must be at most 64"),
        ({"prompt": "a", "shown_candidates": 65}, "shown_candidates=65 must be from 0 to 64"),
        ({"prompt": "a", "token_prior_scale": 2}, "token_prior_scale=2 scales the token prior"),
        ({"prompt": "a", "num_candidates": -1}, "num_candidates=-1 must be at least 1"),
        ({"prompt": "a", "echo": True}, "echo is not supported"),
        ({"prompt": "a", "best_of": 3}, "best_of is not supported"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        (b'{"prompt": "a", "n": 1, "n": 2}', "the field 'n' is given twice"),
        (
            b'{"prompt": "a", "stream_options": {"include_usage": true, "include_usage": false}}',
            "the field 'include_usage' is given twice",
        ),
        (b'{"prompt": "a", "\\ud800": 3}', "unknown field '\\ud800'"),
        ({"prompt": "a", "x" * 9000: 3}, "unknown field 'xxx"),
        ({"prompt": "a", "max_token": 3}, "unknown field 'max_token': did you mean 'max_tokens'?"),
    ],
)
def test_bad_requests_are_refused_with_status_400_and_a_reason(port, body, message):
    status, _, answer = send(port, body)
    if message is None:  # an empty list of ids is an empty prompt
        assert status == 200
        return
    assert status == 400, answer
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in answer["error"]["message"]
    name = message.partition("=")[0].partition(" ")[0]
    assert answer["error"]["param"] in (None, "n", "prompt", name)
    assert name != "prompt" or answer["error"]["param"] == "prompt"
    assert len(json.dumps(answer)) < 1000


def test_a_request_without_max_tokens_leaves_room_in_a_short_context():
    generator = tiny(block_tokens=16).generator()
    generator.options = dataclasses.replace(generator.options, max_tokens=128, temperature=1.0)
    with serving(generator) as port:
        status, _, answer = send(port, {"prompt": "abc", "seed": 0})
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 8


def test_a_value_of_any_depth_is_refused(port):
    """Also of one that is just not too deep to be read, and too deep to be quoted."""
    for depth in range(900, 1001, 2):
        body = b'{"prompt": "a", "user": ' + depth * b"[" + depth * b"]" + b"}"
        assert send(port, body)[0] == 400


def test_a_message_that_quotes_much_keeps_its_reason(port):
    name = "x" * 3000
    body = f'{{"prompt": "a", "{name}": 1, "{name}": 1}}'.encode()
    message = send(port, body)[2]["error"]["message"]
    assert len(message) == 500 and message.endswith("' is given twice: give it once")


ROUTES = "this server has GET /, POST /v1/completions, GET /v1/models, GET /health, GET /metrics, and no chat format"


@pytest.mark.parametrize(
    "status, request_, message",
    [
        (404, {"body": {"prompt": "a", "model": "gpt-5"}}, "'gpt-5' is not served here"),
        (404, {"body": {}, "path": "/v1/chat/completions"}, f"POST /v1/chat/completions: {ROUTES}"),
        (404, {"body": b"", "path": "/../../etc/passwd", "method": "GET"}, ROUTES),
        (405, {"body": b"", "method": "GET"}, "GET /v1/completions: send POST to this path"),
        (405, {"body": {}, "path": "/v1/models"}, "POST /v1/models: send GET or HEAD to this path"),
        (413, {"body": {"prompt": "a" * 10_001}}, "the body must have at most"),
        (415, {"body": {"prompt": "a"}, "Content-Type": "text/plain"}, "must be application/json"),
    ],
)
def test_other_refusals_have_their_own_status_and_reason(port, status, request_, message):
    got, _, answer = send(port, **request_)
    assert got == status and message in answer["error"]["message"]


def test_a_name_that_is_not_this_machines_is_not_answered(port):
    """As a page of another site would send it whose name was given this machine's address."""
    for path, method in (("/v1/completions", "POST"), ("/", "GET")):
        assert send(port, {"prompt": "a"}, path, method, Host="other.example")[0] == 400
    for name in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        assert send(port, b"", "/health", "GET", Host=name)[0] == 200


def test_a_content_type_is_read_as_http_writes_it(port):
    kind = {"Content-Type": "Application/JSON ; charset=utf-8"}
    assert send(port, {}, **kind)[0] == 400


def test_openais_client_raises_its_own_exceptions(port):
    with pytest.raises(openai.BadRequestError, match="temperature=2 must be in"):
        client(port).completions.create(model="tiny", prompt="a", temperature=2)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client(port).completions.create(model="other", prompt="a")


def test_fields_with_neutral_values_are_accepted(port):
    more = {"best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0, "logit_bias": {}}
    assert send(port, {"prompt": "a", "user": "me", "top_p": 1} | more | FAST)[0] == 200


@pytest.mark.slow
def test_a_baseline_takes_top_p_and_not_calms_options():
    made = tiny("head=softmax")
    with serving(made.generator()) as port:
        options = {"temperature": 1.5, "top_p": 0.5, "max_tokens": 6}
        done = client(port).completions.create(model="tiny", prompt="a", seed=2, **options)
        assert_same(done.choices, expected(["a"], 2, made.generator(), **options))
        status, _, answer = send(port, {"prompt": "a", "sampler": "batch"})
        assert (status, answer["error"]["param"]) == (400, "sampler")


@pytest.mark.slow
def test_two_models_answer_by_their_names():
    baseline = tiny("head=softmax").generator()
    with serving(tiny().generator(), baseline=baseline) as port:
        listed = send(port, b"", "/v1/models", "GET")[2]["data"]
        assert [(one["id"], one["calm"]["is_calm"]) for one in listed] == [
            ("tiny", True),
            ("baseline", False),
        ]
        for name, generator in (("tiny", None), ("baseline", baseline)):
            done = client(port).completions.create(model=name, prompt="a", seed=4, **FAST)
            assert done.model == name
            assert_same(done.choices, expected(["a"], 4, generator, **FAST))
        assert send(port, {"prompt": "a"} | FAST)[2]["model"] == "tiny"
        status, _, answer = send(port, {"model": "third", "prompt": "a"})
        assert status == 404 and "'tiny' or 'baseline'" in answer["error"]["message"]
        metrics = send(port, b"", "/metrics", "GET")[2]
        assert 'calm_requests_total{status="200"} 3.0' in metrics


@pytest.mark.slow
def test_a_chunk_has_its_candidates_if_they_are_asked_for(port):
    """In a stream as in a whole answer; the text is the same without them."""
    ask = {"prompt": "a", "seed": 5, "temperature": 0.5, "max_tokens": 8, "sampler": "batch"}
    ask |= {"num_candidates": 12}
    plain = send(port, ask)[2]["choices"][0]
    shown = send(port, ask | {"shown_candidates": 64})[2]["choices"][0]
    assert shown["text"] == plain["text"] and "candidates" not in plain["calm"]
    calm = shown["calm"]
    assert calm["pool"] == [12, 12]
    tokenizer = tiny().tokenizer
    for number, candidates in enumerate(calm["candidates"]):
        assert sum(one["votes"] for one in candidates) == 12
        chunk = calm["tokens"][4 * number : 4 * number + 4]
        assert chunk in [one["tokens"] for one in candidates]
        assert all(one["text"] == tokenizer.decode(one["tokens"]) for one in candidates)
    _, _, text = send(port, ask | {"shown_candidates": 64, "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:2]]
    streamed = [event["choices"][0]["calm"]["candidates"] for event in events]
    assert streamed == calm["candidates"]


# --- Requests that do not end as they should


class Gated(Generator):
    """A generator whose batches wait for a gate before every step, and fail when they are told to."""

    def __init__(self):
        made = tiny()
        super().__init__(made.task, made.params, made.frozen, made.tokenizer, made.config)
        self.gate, self.fails = threading.Event(), False
        self.num_pieces = 0

    def batch(self, num_places):
        batch = super().batch(num_places)
        step = batch.step

        def gated(most):
            self.gate.wait(WAIT_SECONDS)
            if self.fails:
                raise RuntimeError("as asked")
            pieces = step(most)
            self.num_pieces += len(pieces)
            return pieces

        batch.step = gated
        return batch


def unfinished(port: int) -> float:
    _, _, text = send(port, b"", "/metrics", "GET")
    return sum(
        float(line.split()[1]) for line in text.splitlines() if line.startswith("calm_texts_")
    )


@pytest.mark.slow
def test_a_full_queue_is_refused_with_retry_after():
    """One place, and room for two texts that wait."""
    generator = Gated()
    with (
        serving(generator, dataclasses.replace(LIMITS, waiting=2), 1) as port,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        ask = {"prompt": "a", "seed": 0} | FAST
        first = pool.submit(send, port, ask | {"n": 2})
        wait_until(lambda: unfinished(port) == 2)
        status, headers, answer = send(port, ask | {"n": 2})
        assert (status, headers["Retry-After"]) == (429, "1")
        assert answer["error"]["type"] == "rate_limit_error"
        second = pool.submit(send, port, ask)
        wait_until(lambda: unfinished(port) == 3)
        assert send(port, ask)[0] == 429
        # More texts than there is ever room for are no reason to try again.
        status, headers, answer = send(port, ask | {"n": 4})
        assert (status, "Retry-After" in headers) == (400, False)
        assert "4 texts: at most 3" in answer["error"]["message"]
        generator.gate.set()
        assert first.result()[0] == second.result()[0] == 200
        assert send(port, ask)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_ends_with_status_504(stream):
    generator = Gated()
    with serving(generator, dataclasses.replace(LIMITS, seconds=0.2)) as port:
        status, _, answer = send(port, {"prompt": "a", "stream": stream} | FAST)
        if stream:  # the status was sent already
            answer = json.loads(answer.removeprefix("data: "))
        assert status == (200 if stream else 504)
        assert answer["error"]["type"] == "timeout_error"
        assert unfinished(port) == 0
        generator.gate.set()


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_more_is_computed_for_a_client_that_has_gone(stream):
    """But for the step that is being computed: `CHUNKS_PER_CALL`, or one in a stream, of the texts in 4 places."""
    generator = Gated()
    with serving(generator, dataclasses.replace(LIMITS, max_tokens=200)) as port:
        ask = {"prompt": "a", "stream": stream, "n": 8, "seed": 0, "temperature": 1}
        body = json.dumps(ask | {"max_tokens": 200}).encode()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            wait_until(lambda: unfinished(port) == 8)
        wait_until(lambda: unfinished(port) == 0)
        generator.gate.set()
        # The next request is answered: nothing is in its way.
        status, _, answer = send(port, {"prompt": "a", "seed": 0} | FAST)
        assert status == 200 and answer["choices"][0]["text"]
    assert generator.num_pieces <= 3 + 4 * (1 if stream else CHUNKS_PER_CALL)


def test_a_client_that_sends_half_a_body_and_goes_disturbs_nobody(port):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
    assert send(port, {"prompt": "a"} | FAST)[0] == 200


def test_a_body_that_does_not_come_ends_with_status_408(port, monkeypatch):
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\n\r\n{"
        )
        connection.settimeout(WAIT_SECONDS)
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.slow
def test_a_client_that_does_not_read_its_stream_is_given_up(monkeypatch):
    """The texts are longer than all buffers on the way, so the stream would never end; it may last two seconds here."""
    monkeypatch.setattr(app, "_MORE_SECONDS", 2 - LIMITS.seconds)
    limits = dataclasses.replace(LIMITS, texts=100)
    with serving(tiny().generator(), limits, 100) as port:
        ask = {"prompt": "a", "stream": True, "n": 100, "max_tokens": 64, "temperature": 1}
        body = json.dumps(ask).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            wait_until(
                lambda: "calm_request_seconds_count 1.0" in send(port, b"", "/metrics", "GET")[2]
            )
        assert unfinished(port) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails_is_reported_and_the_next_request_is_answered(stream):
    generator = Gated()
    generator.fails = True
    generator.gate.set()
    with serving(generator) as port:
        ask = {"prompt": "a", "seed": 0, "stream": stream} | FAST
        status, _, answer = send(port, ask)
        if stream:
            answer = json.loads(answer.removeprefix("data: "))
        assert status == (200 if stream else 500)
        assert answer["error"]["type"] == "server_error"
        generator.fails = False
        assert send(port, {"prompt": "a", "seed": 0} | FAST)[0] == 200


def test_after_the_models_thread_has_ended_requests_are_refused(monkeypatch):
    monkeypatch.setattr(app.Engine, "_run", lambda self: None)
    with serving(tiny().generator()) as port:
        while send(port, b"", "/health", "GET")[0] != 503:
            pass
        status, _, answer = send(port, {"prompt": "a"})
        assert (status, answer["error"]["type"]) == (503, "server_error")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_is_answered_at_once_when_the_models_thread_ends(monkeypatch):
    def take_one_job_and_end(engine):
        engine._orders.get()
        raise SystemExit

    monkeypatch.setattr(app.Engine, "_run", take_one_job_and_end)
    with serving(tiny().generator(), dataclasses.replace(LIMITS, seconds=1e9)) as port:
        status, _, answer = send(port, {"prompt": "a"})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert send(port, b"", "/health", "GET")[0] == 503


# --- The command


@contextlib.contextmanager
def served_by_the_command(folder: pathlib.Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """The process of `python -m calm_jax.serve` with a tiny model, and its port."""
    tiny().save(folder)
    server = workdirs.start("calm_jax.serve", f"--workdir={folder}", "--port=0", "--batch_size=1")
    try:
        line = server.stdout.readline()
        assert line.startswith(f"{folder.name} is served on http://127.0.0.1:")
        yield server, int(re.search(r"127.0.0.1:(\d+)/v1", line)[1])
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_after_sigterm_the_server_answers_what_it_has_and_exits_with_status_0(tmp_path):
    with served_by_the_command(tmp_path / "model") as (server, port):
        options = {"max_tokens": 40, "temperature": 1.0}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            ask = {"prompt": "a", "seed": 5, "n": 3} | options
            answers = [
                pool.submit(send, port, ask | {"stream": stream}) for stream in (0 > 1, 1 > 0)
            ]
            wait_until(lambda: unfinished(port) == 6)
            server.send_signal(signal.SIGTERM)
            (status, _, whole), (_, _, text) = (answer.result() for answer in answers)
        texts = expected(["a"] * 3, 5, **options)
        assert status == 200
        assert [choice["text"] for choice in whole["choices"]] == [one.text for one in texts]
        assert text.endswith("data: [DONE]\n\n")
        assert server.wait(WAIT_SECONDS) == 0
        (line,) = server.stderr.read().splitlines()
        assert line == (
            "SIGTERM: open requests are answered first; a second signal ends the server at once"
        )
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.slow
def test_a_second_signal_ends_the_server_at_once_with_one_line(tmp_path):
    """Also while the model computes. Another signal that comes less than a second after the first counts as the first."""
    with served_by_the_command(tmp_path / "model") as (server, port):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(send, port, {"prompt": "a", "n": 100, "max_tokens": 40})
            wait_until(lambda: unfinished(port) == 100)
            # Two of the same number could become one before the server receives them.
            for number in (signal.SIGINT, signal.SIGHUP):
                server.send_signal(number)
            time.sleep(1.2)
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT_SECONDS) == EXIT_INTERRUPTED
            assert isinstance(answer.exception(), (OSError, http.client.HTTPException))
        first, second = server.stderr.read().splitlines()
        assert first.endswith(
            ": open requests are answered first; a second signal ends the server at once"
        )
        assert second == "interrupted: SIGTERM, the second signal: open requests are not answered"


@pytest.mark.slow
def test_bad_flags_end_the_command_with_one_line(tmp_path):
    tiny().save(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        workdir = f"--workdir={tmp_path / 'model'}"
        cases = [
            ([], "give the folder of a trained model"),
            ([f"--workdir={tmp_path}", "--port=0"], f"{tmp_path} is no workdir"),
            ([workdir, f"--port={port}"], f"--port={port}: another program listens there: give"),
            ([workdir, "--host=10.9.8.7"], "--host=10.9.8.7 --port=8000: cannot listen there (C"),
            (["--port=99999"], "flag --port=99999: "),
            (
                [workdir, "--port=0", "--limit_texts=0"],
                "--limit_texts=0 must be positive and finite",
            ),
            (
                [workdir, "--port=0", "--limit_seconds=inf"],
                "--limit_seconds=inf must be positive and finite",
            ),
            ([workdir, "--port=0", "--batch_size=-1"], "--batch_size=-1 must be at least 0"),
            ([workdir, "--port=0", f"--compare={tmp_path / 'model'}"], "--compare="),
        ]
        for flags, message in cases:
            line = workdirs.run("calm_jax.serve", *flags, status=2)
            assert line.startswith(f"error: {message}")


@pytest.mark.slow
def test_without_the_extra_the_command_says_what_to_install(tmp_path):
    code = (
        "import runpy, sys\n"
        "sys.modules['uvicorn'] = None\n"
        f"sys.argv = ['serve', '--workdir={tmp_path}']\n"
        "runpy.run_module('calm_jax.serve', run_name='__main__', alter_sys=False)\n"
    )
    done = workdirs.run_program(code, status=2)
    assert done.stdout == ""
    assert (
        done.stderr
        == "error: serving needs uvicorn: pip install -c constraints.txt -e '.[serve]' in the clone\n"
    )
