"""Runs the application in uvicorn until a signal comes, and lets it answer the requests that it has accepted."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from calm_jax.cli.signals import ENDING, EXIT_INTERRUPTED, SignalHandler


def _say(line: str) -> None:
    """Writes a line to stderr, if it can be written; in a signal handler, where the stream may be in use."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


class _Server(uvicorn.Server):
    """A server that returns after a signal, where uvicorn's own server would raise the signal again.

    A second signal ends the process, without the answers to open requests.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int) -> None:
            name = signal.Signals(number).name
            if self.should_exit:
                _say(f"interrupted: {name}, the second signal: open requests are not answered")
                # Python's own end would unload libraries in which the model's thread may be computing, which aborts the process.
                os._exit(EXIT_INTERRUPTED)
            self.should_exit = True
            handler.note()
            if self.server_state.tasks:
                _say(
                    f"{name}: open requests are answered first; a second signal ends the server at once"
                )

        # Assigned before its block begins, as a signal may come at once.
        handler = SignalHandler(ENDING, end)
        with handler:
            yield


def listen(
    app: Starlette, listener: socket.socket, most_connections: int, drain_seconds: int
) -> None:
    """Serves until SIGTERM, SIGHUP or Ctrl-C. Then it takes no more requests, and returns when the accepted ones are answered.

    A second signal, at least a second later, ends the process at once, with status 75.

    Args:
      app: the application.
      listener: a listening socket.
      most_connections: further connections are answered with status 503.
      drain_seconds: the longest time to wait for the last responses after the signal.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        limit_concurrency=most_connections,
        timeout_graceful_shutdown=drain_seconds,
    )
    asyncio.run(_Server(config).serve(sockets=[listener]))
