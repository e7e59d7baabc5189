"""Several processes as one command, for `benchmarks.faults`: a training in two processes, or a server with its clients.

    python -m benchmarks.several two calm_jax.main ARGUMENTS
    python -m benchmarks.several asked WORKDIR ANSWERS.jsonl

The second starts `calm_jax.serve`. For each prompt, one client closes its connection in the midst of a stream, and another
one asks for the text, which is written to ANSWERS.jsonl. Both commands end with the status of their processes, and leave no
process behind.
"""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator

from benchmarks import ROOT
from benchmarks.client import completion, server
from calm_jax.cli.files import write_atomically

# Seconds that each process may take.
_MOST_SECONDS = 900
_PROMPTS = ("def ", "class ", "")


@contextlib.contextmanager
def _started(*commands: list[str]) -> Iterator[list[subprocess.Popen]]:
    """Starts processes of `python -m`, which are killed at the end if they still run."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _two(arguments: list[str]) -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = [*arguments, f"--coordinator=localhost:{port}", "--num_processes=2"]
    with _started(*([*given, f"--process_id={index}"] for index in range(2))) as running:
        # Nobody reads the pipes: each process prints less than a pipe holds.
        statuses = [process.wait(_MOST_SECONDS) for process in running]
        # That of a process that a signal has ended is negative.
        return next((status for status in statuses if status < 0), max(statuses))


def _asked(workdir: str, answers: str) -> int:
    lines = []
    with server(workdir) as (process, address):
        for prompt in _PROMPTS:
            body = {"prompt": prompt, "seed": 1, "max_tokens": 16}
            with completion(address, body | {"stream": True}) as vanishing:
                vanishing.read(20)
            with completion(address, body) as answer:
                texts = [one["text"] for one in json.loads(answer.read())["choices"]]
            lines.append(json.dumps({"prompt": prompt, "texts": texts}) + "\n")
    write_atomically(pathlib.Path(answers), "".join(lines))
    return process.returncode


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    sys.exit(_two(rest) if kind == "two" else _asked(*rest))
