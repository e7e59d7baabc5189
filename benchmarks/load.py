"""Load test: sends many requests to the server at once, times the responses, and checks that load changes none of them.

    python -m benchmarks.load --workdir=runs/quickstart [--requests=200] [--max_tokens=32]

Each request has its own prompt and seed, every fourth another temperature, and every third is a stream. All are sent at once,
after one of each temperature that compiles its program. The texts are then compared with those of `calm_jax.Generator`, one
prompt at a time. The command ends with status 1 if a response is lost or differs.
"""

import concurrent.futures
import dataclasses
import http.client
import json
import sys
import time
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.client import completion, server
from calm_jax.cli import progress
from calm_jax.cli.command import command
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.run.generator import Generator

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_REQUESTS = flags.DEFINE_integer("requests", 200, "requests at once", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 32, "new tokens of each text", lower_bound=1)
_WORDS = ("def main(", "class ", "import ", "", "é 日本 ", "return [")


def _asked(number: int) -> dict[str, Any]:
    """The body of a request."""
    return {
        "prompt": f"{_WORDS[number % len(_WORDS)]}{number}",
        "seed": number,
        "temperature": 1.0 if number % 4 else 0.5,
        "max_tokens": _MAX_TOKENS.value,
        "stream": number % 3 == 0,
    }


def _ask(address: str, body: dict[str, Any]) -> tuple[str | None, float]:
    """The text of a response, None if it is lost, and the seconds that it took."""
    began = time.perf_counter()
    try:
        with completion(address, body) as response:
            answer = response.read().decode()
        lines = [answer]
        if body["stream"]:
            *events, _, _ = answer.split("\n\n")
            lines = [event.removeprefix("data: ") for event in events]
        text = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        text = None
    return text, time.perf_counter() - began


def _alone(bodies: list[dict[str, Any]]) -> list[str]:
    """The text that each client would get if its request were the only one."""
    generator = Generator.load(_WORKDIR.value)
    texts = []
    with progress.Countdown("comparing", len(bodies), "texts") as countdown:
        for body in bodies:
            changes = {name: body[name] for name in ("temperature", "max_tokens")}
            options = dataclasses.replace(generator.options, **changes)
            texts.append(generator.generate([body["prompt"]], options, body["seed"])[0].text)
            countdown.add(1)
    return texts


@command
def main(argv: list[str]) -> None:
    given_folder(_WORKDIR, "the folder of a trained model")
    bodies = [_asked(number) for number in range(_REQUESTS.value)]
    with server(_WORKDIR.value) as (process, address):
        for number in range(2):
            _ask(address, _asked(number))
        began = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: _ask(address, body), bodies))
        seconds = time.perf_counter() - began
        memory = process.memory_info().rss
    median, slow = np.percentile([one for _, one in answers], (50, 99))
    print(
        f"{len(bodies)} requests of {_MAX_TOKENS.value} tokens at once: {len(bodies) / seconds:.1f} requests/s; an answer after "
        f"{median:.1f} s (median), {slow:.1f} s (99th percentile); the server has {memory / 2**20:,.0f} MiB",
        flush=True,
    )
    lost = sum(text is None for text, _ in answers)
    pairs = zip(answers, _alone(bodies), strict=True)
    other = sum(text not in (None, alone) for (text, _), alone in pairs)
    print(f"lost: {lost}; different from the text without load: {other}")
    sys.exit(1 if lost or other else 0)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
