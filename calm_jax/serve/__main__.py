"""Serves a trained model with the interface of OpenAI's completions.

python -m calm_jax.serve --workdir=runs/quickstart

Options that a request does not name are those of the model's config, section `sample`. SIGTERM, SIGHUP and Ctrl-C end the server after
the requests that it is answering; a second signal, at least a second later, ends it at once. There is no password: whoever reaches
the port can use the model.
"""

from __future__ import annotations

import errno
import math
import pathlib
import socket
from typing import TYPE_CHECKING, Any

from absl import app as absl_app
from absl import flags

from calm_jax.cli.command import command
from calm_jax.cli.files import local_path
from calm_jax.cli.flags import given_folder, parse_flags
from calm_jax.errors import UserError, installation
from calm_jax.parallel.compilation_cache import set_up_compiler
from calm_jax.parallel.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from calm_jax.config import Config
    from calm_jax.serve.request import Limits

_WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained model")
_COMPARE = flags.DEFINE_string(
    "compare", "", "folder of a second model, which the page shows beside the first"
)
_HOST = flags.DEFINE_string(
    "host", "127.0.0.1", "address to listen on; by default this machine alone"
)
_PORT = flags.DEFINE_integer(
    "port",
    8000,
    "port to listen on; 0 for a free one, which is printed",
    lower_bound=0,
    upper_bound=65535,
)
_MODEL = flags.DEFINE_string("model", "", "name of the model; that of the folder if empty")
_BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 0, "texts continued together; 0 for sample.batch_size of the model's config"
)
_LIMIT_SECONDS = flags.DEFINE_float(
    "limit_seconds", 600, "seconds for an answer; after it status 504"
)
_LIMITS = (
    flags.DEFINE_integer("limit_prompt_tokens", 0, "tokens of a prompt; 0 for the model's context"),
    flags.DEFINE_integer("limit_max_tokens", 0, "new tokens of a text; 0 for the model's context"),
    flags.DEFINE_integer("limit_texts", 128, "prompts times n of a request"),
    flags.DEFINE_integer("limit_draws", 4096, "num_candidates and max_draws of a request"),
    flags.DEFINE_integer("limit_waiting", 512, "texts that wait for a place; beyond it status 429"),
    flags.DEFINE_integer("limit_body_bytes", 2**20, "bytes of a request"),
    _LIMIT_SECONDS,
)
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Connections that are allowed beyond one for each text: for the page and /metrics, and for requests that are still being sent.
_MORE_CONNECTIONS = 256


def _limits(config: Config) -> Limits:
    from calm_jax.serve.request import Limits

    given: dict[str, Any] = {flag.name.removeprefix("limit_"): flag.value for flag in _LIMITS}
    for name in ("prompt_tokens", "max_tokens"):
        given[name] = given[name] or config.lm.data.block_tokens
    return Limits(**given)


def _names() -> dict[str, str]:
    """The folders of the models by their names."""
    first = _MODEL.value or pathlib.Path(_WORKDIR.value).resolve().name
    if not _COMPARE.value:
        return {first: _WORKDIR.value}
    second = pathlib.Path(_COMPARE.value).resolve().name
    if second == first:
        raise UserError(
            f"--compare={_COMPARE.value} has the name {first!r} of the first model: give that another by --model=NAME"
        )
    return {first: _WORKDIR.value, second: _COMPARE.value}


def _listen() -> socket.socket:
    family = socket.AF_INET6 if ":" in _HOST.value else socket.AF_INET
    try:
        return socket.create_server((_HOST.value, _PORT.value), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"--port={_PORT.value}: another program listens there: give another --port, or 0 for a free one"
            ) from error
        # Python adds the address, which the message begins with.
        reason = str(error.strerror).partition(" (while ")[0]
        raise UserError(
            f"--host={_HOST.value} --port={_PORT.value}: cannot listen there ({reason})"
        ) from error


@command
def main(argv: list[str]) -> None:
    given_folder(_WORKDIR, "the folder of a trained model")
    local_path(_COMPARE.value, "--compare")
    if _BATCH_SIZE.value < 0:
        raise UserError(f"--batch_size={_BATCH_SIZE.value} must be at least 0")
    names = _names()
    # Imported here, so that --help and bad flags do not wait for JAX.
    from calm_jax.run.generator import Generator
    from calm_jax.run.workdir import Workdir

    try:
        from calm_jax.serve.app import LOOPBACK_NAMES, Served, make_app
        from calm_jax.serve.listen import listen
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: {installation('serve')}") from error
    # Wrong flags and folders are refused before any parameters are read.
    limits = {
        name: _limits(Workdir(local_path(folder, "folder")).config)
        for name, folder in names.items()
    }
    with _listen() as listener:
        set_up_compiler()
        models = {}
        for name, folder in names.items():
            generator = Generator.load(folder)
            num_places = _BATCH_SIZE.value or generator.options.batch_size
            models[name] = Served(generator, num_places, limits[name])
        hosts = LOOPBACK_NAMES if _HOST.value in _LOOPBACK else ("*",)
        app = make_app(models, hosts)
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{port}"
        are = "are" if len(models) > 1 else "is"
        print(
            f"{' and '.join(models)} {are} served on {url} (a page) and {url}/v1 (OpenAI's completions)",
            flush=True,
        )
        most_texts = sum(one.num_places + one.limits.waiting for one in models.values())
        most_connections = most_texts + _MORE_CONNECTIONS
        # Every response ends within --limit_seconds, at the latest with a timeout error; 60 s are a margin.
        listen(app, listener, most_connections, math.ceil(_LIMIT_SECONDS.value) + 60)


if __name__ == "__main__":
    keep_freed_memory()
    absl_app.run(main, flags_parser=parse_flags)
