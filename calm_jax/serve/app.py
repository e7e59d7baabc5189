"""The routes of the server, and how a request is handled, from its body to the response.

POST /v1/completions  OpenAI's completions, whole or as server-sent events
GET /v1/models        the models, with their default options; /v1/models/NAME is one of them
GET /health           200 while the model's thread runs
GET /metrics          Prometheus's text format
GET /                 a page for people, page.html
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import prometheus_client as prometheus
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from calm_jax.errors import UserError
from calm_jax.run.generator import Generator
from calm_jax.sampling.samplers import SAMPLERS
from calm_jax.serve.answer import as_json, choice, failed, streamed_choice, usage
from calm_jax.serve.engine import Engine, EngineError, Job
from calm_jax.serve.metrics import Metrics
from calm_jax.serve.request import (
    CompletionRequest,
    Limits,
    RequestError,
    asked_model,
    default_options,
    load,
    parse,
    refused,
)

# Seconds that a client may take to send a request's body.
_BODY_SECONDS = 30.0
# Seconds beyond `Limits.seconds` that a client may take to read the rest of a stream.
_MORE_SECONDS = 10.0
# nginx's status for a request whose client closed the connection; nobody reads the response.
_CLIENT_CLOSED = 499
_TIMEOUT = "timeout_error"
_ENDED = "the model's thread has ended"
_PAGE = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
# This machine's names in the header Host. Starlette before 1.0 reads [::1]:8000 as the name "[", which no other site can have.
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]", "[")
# The page's Content-Security-Policy: it loads no other files, and sends requests to this server only.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model that is served.

    Attributes:
      generator: the model; once the application runs, nothing else may use it.
      num_places: how many texts are continued together.
      limits: the largest values that a request may have.
    """

    generator: Generator
    num_places: int
    limits: Limits


def make_app(models: Mapping[str, Served], hosts: Sequence[str]) -> Starlette:
    """The application, for uvicorn or another ASGI server.

    Args:
      models: by name. The first one gets the requests that name no model, and its limits of body size and response time hold
        for all models.
      hosts: names in the header Host that are answered, "*" for all. The names of this machine alone protect against DNS
        rebinding: the page of another site cannot reach a server on this machine by giving its own name this machine's address.
    """
    server = _Server(models)
    return Starlette(
        routes=[
            Route("/", server.page),
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/v1/models/{name:path}", server.model),
            Route("/health", server.health),
            Route("/metrics", server.show_metrics),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={
            RequestError: _answer_refusal,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_failure,
        },
        lifespan=server.lifespan,
    )


class _Server:
    def __init__(self, models: Mapping[str, Served]):
        self._models = models
        self._limits = next(iter(models.values())).limits
        self._engines = {
            name: Engine(one.generator, one.num_places) for name, one in models.items()
        }
        self._metrics = Metrics(list(self._engines.values()))
        self._began = int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        for engine in self._engines.values():
            engine.start()
        yield
        for engine in self._engines.values():
            await run_in_threadpool(engine.stop)

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    async def models(self, request: Request) -> Response:
        about = [self._about(name) for name in self._models]
        return JSONResponse({"object": "list", "data": about})

    async def model(self, request: Request) -> Response:
        name = asked_model({"model": request.path_params["name"]}, list(self._models))
        return JSONResponse(self._about(name))

    def _about(self, name: str) -> dict[str, Any]:
        """A model in the format of OpenAI's API, with its options and limits."""
        one = self._models[name]
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "calm_jax",
            "calm": {
                "is_calm": one.generator.has_autoencoder,
                "chunk_size": one.generator.task.chunk_size,
                "samplers": list(SAMPLERS),
                "options": dataclasses.asdict(default_options(one.generator, one.limits)),
                "limits": dataclasses.asdict(one.limits),
            },
        }

    async def health(self, request: Request) -> Response:
        is_alive = all(engine.is_alive for engine in self._engines.values())
        return JSONResponse(
            {"status": "ok" if is_alive else _ENDED},
            200 if is_alive else 503,
        )

    async def show_metrics(self, request: Request) -> Response:
        shown = prometheus.generate_latest(self._metrics.registry)
        return Response(shown, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def completions(self, request: Request) -> Response:
        """Checks a request, submits it, and answers."""
        began = time.monotonic()
        try:
            fields = load(await self._body(request))
            model = asked_model(fields, list(self._models))
            asked = parse(fields, self._models[model].generator, self._models[model].limits)
            job = await self._submit(model, asked)
        except (RequestError, ClientDisconnect) as error:
            status = error.status if isinstance(error, RequestError) else _CLIENT_CLOSED
            self._metrics.requests.labels(status).inc()
            raise

        def close(status: int) -> None:
            self._engines[model].close(job)
            self._metrics.count(job)
            self._metrics.requests.labels(status).inc()
            self._metrics.seconds.observe(time.monotonic() - began)

        answer = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "calm": {"seed": asked.seed},
        }
        if asked.stream:
            events = self._events(job, answer, asked.include_usage)
            return _Stream(events, self._limits.seconds + _MORE_SECONDS, close)
        status = 500
        try:
            await self._finish(request, job)
            choices = [choice(row.continuation) for row in job.rows]
            status = 200
            return JSONResponse(answer | {"choices": choices, "usage": usage(job)})
        except RequestError as error:
            status = error.status
            raise
        finally:
            close(status)

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A page of another site can send other types, such as text/plain, without asking this server first (CORS preflight).
            raise RequestError(415, "the Content-Type must be application/json")
        most = self._limits.body_bytes
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise RequestError(413, f"the body must have at most {most} bytes")
        except TimeoutError as error:
            raise RequestError(
                408, f"the body did not come within {_BODY_SECONDS:g} s", kind=_TIMEOUT
            ) from error
        return bytes(body)

    async def _submit(self, model: str, asked: CompletionRequest) -> Job:
        """Tokenises the prompts, and gives them to the model's engine if there is room."""
        served, engine = self._models[model], self._engines[model]
        try:
            arguments = asked.prompts, asked.options, asked.seed, asked.texts_per_prompt
            rows = await run_in_threadpool(served.generator.rows, *arguments)
        except UserError as error:
            raise refused(error) from error
        most = served.limits.prompt_tokens
        for row in rows:
            if len(row.ids) > most:
                raise RequestError(
                    400,
                    f"prompt {row.continuation.index // asked.texts_per_prompt} has {len(row.ids)} tokens; at most {most} are allowed here",
                    "prompt",
                )
        most = engine.num_places + served.limits.waiting
        if len(rows) > most:
            raise RequestError(
                400, f"{len(rows)} texts: at most {most} can be asked for at once here", "n"
            )
        running, waiting = engine.count_unfinished()
        if running + waiting + len(rows) > most:
            raise RequestError(
                429,
                f"texts that wait already: {waiting}; try again later",
                kind="rate_limit_error",
                headers={"Retry-After": "1"},
            )
        if not engine.is_alive:
            raise RequestError(503, _ENDED, kind="server_error")
        job = Job(rows, asked.texts_per_prompt, asked.stream)
        engine.submit(job)
        return job

    async def _finish(self, request: Request, job: Job) -> None:
        """Waits until all texts have ended.

        Raises `RequestError` if the model fails, the time for the response is over, or the client closes the connection.
        """

        async def collect() -> None:
            async for _ in job.pieces(self._limits.seconds):
                pass

        async def disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        tasks = [asyncio.create_task(collect()), asyncio.create_task(disconnect())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] not in done:
                raise RequestError(_CLIENT_CLOSED, "the client closed the connection")
            await tasks[0]
        except EngineError as error:
            raise failed() from error
        except TimeoutError as error:
            raise self._too_late() from error
        finally:
            for task in tasks:
                task.cancel()

    async def _events(self, job: Job, answer: dict, include_usage: bool) -> AsyncIterator[str]:
        """The server-sent events of a stream. An error is an event, too, because the HTTP status was sent before it."""

        def event(**fields: Any) -> str:
            return f"data: {json.dumps(answer | fields)}\n\n"

        try:
            async for piece in job.pieces(self._limits.seconds):
                yield event(choices=[streamed_choice(piece)])
            if include_usage:
                yield event(choices=[], usage=usage(job))
            yield "data: [DONE]\n\n"
        except TimeoutError:
            yield f"data: {json.dumps(as_json(self._too_late()))}\n\n"
        except EngineError:
            yield f"data: {json.dumps(as_json(failed()))}\n\n"

    def _too_late(self) -> RequestError:
        seconds = self._limits.seconds
        return RequestError(504, f"the answer was not ready in {seconds:g} s", kind=_TIMEOUT)


class _Stream(StreamingResponse):
    """Server-sent events. `close(status)` is called at the end, even if the client closes the connection or does not read."""

    def __init__(self, events: AsyncIterator[str], seconds: float, close: Callable[[int], None]):
        super().__init__(events, media_type="text/event-stream")
        self.headers["Cache-Control"] = "no-cache"
        self._seconds, self._close = seconds, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect, TimeoutError):
                async with asyncio.timeout(self._seconds):
                    await super().__call__(scope, receive, send)
        finally:
            self._close(self.status_code)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(as_json(error), error.status, error.headers)


def _routes(app: Starlette) -> str:
    """The method and path of each route that has no parameter, for messages."""
    routes = [one for one in app.routes if isinstance(one, Route) and "{" not in one.path]
    return ", ".join(
        f"{'POST' if 'POST' in (one.methods or ()) else 'GET'} {one.path}" for one in routes
    )


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = error.detail
    if error.status_code == 404:
        reason = f"this server has {_routes(request.app)}, and no chat format"
    elif error.status_code == 405 and error.headers:
        reason = f"send {' or '.join(sorted(error.headers['Allow'].split(', ')))} to this path"
    refusal = RequestError(error.status_code, f"{request.method} {request.url.path}: {reason}")
    return JSONResponse(as_json(refusal), error.status_code, error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED)


async def _answer_failure(request: Request, error: Exception) -> Response:
    return JSONResponse(as_json(failed()), 500)
