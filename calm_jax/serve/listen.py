"""Runs the application in uvicorn until a signal comes, and lets it answer the requests that it has accepted."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from calm_jax.cli.signals import ENDING, SignalHandler


class _Server(uvicorn.Server):
    """A server that returns after a signal, where uvicorn's own server would raise the signal again.

    After a second signal it does not wait for open requests.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int) -> None:
            self.force_exit = self.should_exit
            self.should_exit = True

        with SignalHandler(ENDING, end):
            yield


def listen(
    app: Starlette, listener: socket.socket, most_connections: int, drain_seconds: int
) -> None:
    """Serves until SIGTERM, SIGHUP or Ctrl-C. Then it takes no more requests, and returns when the accepted ones are answered.

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
