"""Reads the body of `POST /v1/completions`, and checks it against limits before anything is computed."""

import dataclasses
import json
import math
import secrets
from collections.abc import Sequence
from typing import Any

from calm_jax.cli.progress import counted
from calm_jax.errors import UserError, nearest, shortened
from calm_jax.run.continuation import Prompt
from calm_jax.run.generator import Generator
from calm_jax.sampling.config import CALM_ONLY, SampleConfig

# At most so many stop strings in a request, and characters in each: every chunk is searched for them.
_MOST_STOPS, _LONGEST_STOP = 16, 256
# The most characters of a message, which may quote what the client sent.
_LONGEST_MESSAGE = 500
# Python refuses to read the digits of a number that is several times as long. No field takes one as long as this.
_MOST_DIGITS = 1000

# Fields of OpenAI's interface that this server does not have: they are accepted with these values, which change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
}
# The options of `config.sample` that a request may change.
_OPTIONS: dict[str, type] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "sampler": str,
    "num_candidates": int,
    "max_draws": int,
    "shown_candidates": int,
    "token_prior_scale": float,
    "prompt_alignment": str,
    "long_context": str,
}
_FIELDS = ("model", "prompt", *_OPTIONS, "stop", "seed", "n", "stream", "stream_options", "user")


class RequestError(Exception):
    """A request that is refused; the body of the answer is that of OpenAI's errors.

    Attributes:
      status: the HTTP status, 4xx or 5xx.
      message: a message for the client's developer.
      param: the field that is wrong, or None.
      kind: OpenAI's `type`.
      headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param = status, param
        self.message = shortened(message, _LONGEST_MESSAGE)
        self.kind, self.headers = kind, headers


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest values that a request may have; the server refuses requests beyond them.

    Attributes:
      prompt_tokens: tokens of each prompt, with bos.
      max_tokens: new tokens of each text.
      texts: prompts times `n` of one request.
      draws: `num_candidates` and `max_draws`.
      waiting: texts of all clients together that wait for a place in the batch.
      body_bytes: bytes of a request's body.
      seconds: seconds from the end of a request's body to the end of the response.
    """

    prompt_tokens: int
    max_tokens: int
    texts: int
    draws: int
    waiting: int
    body_bytes: int
    seconds: float

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise UserError(
                    f"--limit_{field.name}={getattr(self, field.name)} must be positive and finite"
                )


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A checked request. The response has the texts of `Generator.generate` for these prompts, each `texts_per_prompt` times in the list.

    Attributes:
      prompts: the prompts.
      texts_per_prompt: the request's `n`.
      options: how to sample.
      seed: the seed of the request, or a random one.
      stream: whether the texts are sent chunk by chunk.
      include_usage: whether a stream ends with the counts of tokens.
    """

    prompts: Sequence[Prompt]
    texts_per_prompt: int
    options: SampleConfig
    seed: int
    stream: bool
    include_usage: bool


def asked_model(fields: dict[str, Any], names: Sequence[str]) -> str:
    """The model that a request asks for; the first one if it names none. Raises `RequestError` 404 for any other name."""
    asked = _field(fields, "model", str)
    if asked is None:
        return names[0]
    if asked not in names:
        served = " or ".join(map(repr, names))
        raise RequestError(404, f"model={asked!r} is not served here: it is {served}", "model")
    return asked


def parse(fields: dict[str, Any], generator: Generator, limits: Limits) -> CompletionRequest:
    """Checks a request, except the tokens of its prompts and the range of its seed, which `Generator.rows` checks.

    Args:
      fields: the fields of the body, from `load`.
      generator: the model, whose options are the defaults of the request.
      limits: the limits of the model.

    Raises:
      RequestError: 400 if a field is malformed or beyond a limit.
    """
    if fields.get("prompt") is None:
        raise RequestError(400, "prompt is missing: an empty one starts a document", "prompt")
    prompts, num = _prompts(fields["prompt"]), _field(fields, "n", int)
    num = 1 if num is None else num
    if num < 1:
        raise RequestError(400, f"n={num} must be at least 1", "n")
    if num * len(prompts) > limits.texts:
        asked = f"{counted(len(prompts), 'prompt')} with n={num}"
        most = counted(limits.texts, "text")
        raise RequestError(400, f"{asked}: at most {most} can be asked for here", "n")
    seed = _field(fields, "seed", int)
    stream_options = _field(fields, "stream_options", dict) or {}
    for name, value in stream_options.items():
        # OpenAI's include_obfuscation pads events, to hide their sizes from observers. It is accepted only where it is off.
        if name != "include_usage" and not (name == "include_obfuscation" and not value):
            raise RequestError(
                400,
                f"stream_options has the unknown field {name!r}: it may have include_usage",
                "stream_options",
            )
    # Checked, but not used.
    _field(fields, "user", str)
    return CompletionRequest(
        prompts,
        num,
        _options(fields, generator, limits),
        secrets.randbelow(2**32) if seed is None else seed,
        bool(_field(fields, "stream", bool)),
        bool(_field(stream_options, "include_usage", bool)),
    )


def load(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, with known fields only. Raises `RequestError` 400 for another body."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                raise RequestError(
                    400,
                    f"the field {name!r} is given twice: give it once",
                    name if name in _FIELDS else None,
                )
            fields[name] = value
        return fields

    def whole(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            raise RequestError(
                400, f"a number has {len(digits)} digits: give at most {_MOST_DIGITS}"
            )
        return int(digits)

    try:
        fields = json.loads(body, parse_int=whole, parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object")
    for name, value in fields.items():
        if name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                raise RequestError(400, f"{name} is not supported: leave it out", name)
        elif name not in _FIELDS:
            # The name may be long or invalid Unicode, so it is not returned as `param`: the message quotes it, and is cut.
            raise RequestError(400, f"unknown field {name!r}: {nearest(name, list(_FIELDS))}")
    return fields


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    """The value of a field, None if there is none. An int becomes a float if `kind` is float."""
    value = fields.get(name)
    if value is None:
        return None
    if kind is float and type(value) is int:
        # Clipped, because a huge int does not fit into a float. No option allows such a value.
        value = float(max(-(10**9), min(value, 10**9)))
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        # Lists and objects may be too deep to be written.
        quoted = "" if isinstance(value, list | dict) else f"={json.dumps(value)}"
        raise RequestError(400, f"{name}{quoted} must be {_NAMES[kind]}", name)
    return value


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    dict: "an object",
}


def _prompts(prompt: Any) -> Sequence[Prompt]:
    """Text, token ids, or a list of either, as a list."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt == []:
        raise RequestError(400, "prompt is an empty list", "prompt")
    if isinstance(prompt, list):
        if all(type(token) is int for token in prompt):
            return [prompt]
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if all(
            isinstance(one, list) and all(type(token) is int for token in one) for one in prompt
        ):
            return prompt
    raise RequestError(
        400,
        "prompt must be text, a list of token ids, or a list of texts or of such lists",
        "prompt",
    )


def default_options(generator: Generator, limits: Limits) -> SampleConfig:
    """The options of a request without any. A text takes at most half of a context that does not slide, which leaves room for a prompt."""
    options = generator.options
    most = limits.max_tokens
    if options.long_context == "refuse":
        most = min(most, max(1, generator.max_chunks * generator.task.chunk_size // 2))
    return dataclasses.replace(options, max_tokens=min(options.max_tokens, most))


def _options(fields: dict[str, Any], generator: Generator, limits: Limits) -> SampleConfig:
    given = {name: _field(fields, name, kind) for name, kind in _OPTIONS.items()}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name in CALM_ONLY and not generator.has_autoencoder:
            raise RequestError(400, f"{name} has no meaning for an autoregressive model", name)
    stop = fields.get("stop")
    if stop is not None:
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, list | tuple) or len(stop) > _MOST_STOPS:
            raise RequestError(
                400, f"stop must be a string or a list of up to {_MOST_STOPS} strings", "stop"
            )
        for word in stop:
            if not isinstance(word, str) or len(word) > _LONGEST_STOP:
                raise RequestError(
                    400, f"stop must be made of strings of up to {_LONGEST_STOP} characters", "stop"
                )
        given["stop"] = tuple(stop)
    bounds = {
        "max_tokens": limits.max_tokens,
        "num_candidates": limits.draws,
        "max_draws": limits.draws,
    }
    for name, most in bounds.items():
        if given.get(name, 0) > most:
            raise RequestError(
                400, f"{name}={given[name]} must be at most {most} on this server", name
            )
    try:
        return dataclasses.replace(default_options(generator, limits), **given)
    except UserError as error:
        raise refused(error) from error


def refused(error: UserError) -> RequestError:
    """The answer to a request that the model cannot take."""
    message = str(error)
    # The message begins with the field's name, as in "temperature=2" or "prompt 0".
    name = message.partition("=")[0].partition(" ")[0]
    return RequestError(400, message, name if name in _FIELDS else None)
