"""Starts a server of a workdir, and sends requests to it."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import psutil

from calm_jax.errors import UserError

# Seconds that a client waits; the server answers after 600 s at the latest.
PATIENCE = 660


@contextlib.contextmanager
def server(workdir: str, errors: IO | None = None) -> Iterator[tuple[psutil.Popen, str]]:
    """Starts `python -m calm_jax.serve` with a workdir. Yields the process and its address; at the end the process gets SIGTERM.

    Args:
      workdir: the folder of a trained model.
      errors: where the server's stderr goes; by default, to this process's.

    Raises:
      UserError: if the server ended before it printed its address.
    """
    arguments = [sys.executable, "-m", "calm_jax.serve", f"--workdir={workdir}", "--port=0"]
    process = psutil.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        words = process.stdout.readline().partition("http://")[2].split()
        if not words:
            raise UserError(f"no server of {workdir}: it ended with status {process.wait()}")
        yield process, words[0]
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
        try:
            process.wait(PATIENCE)
        except psutil.TimeoutExpired:
            process.kill()
            raise


@contextlib.contextmanager
def completion(address: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """Yields the response to a request for a completion. At the end the connection is closed, even if not all of it was read."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), kind)
        yield connection.getresponse()
    finally:
        connection.close()
