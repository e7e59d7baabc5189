"""The bodies of responses, in the format of OpenAI's API. Fields that only this server has are under the key `calm`."""

from typing import Any

from calm_jax.run.continuation import Continuation, Piece
from calm_jax.serve.engine import Job
from calm_jax.serve.request import RequestError

# Fields of a `Continuation`: lists with one entry a chunk; lists with one entry a chunk if candidates were asked for; and fields
# that are known only at the end of a text.
_PER_CHUNK = ("draws", "decoded", "exact", "seconds")
_IF_ASKED = ("candidates", "pool")
_AT_THE_END = ("finish", "alignment", "match_draws")


def usage(job: Job) -> dict[str, int]:
    """OpenAI's `usage`: numbers of tokens in the prompts of a request, each counted once, and in all texts."""
    prompt = job.num_prompt_tokens
    new = sum(len(row.continuation.tokens) for row in job.rows)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _reason(one: Continuation) -> str:
    """OpenAI's `finish_reason`, in which eos and stop strings are the same."""
    return "length" if one.finish == "length" else "stop"


def _per_chunk(one: Continuation) -> tuple[str, ...]:
    return _PER_CHUNK + (_IF_ASKED if one.candidates else ())


def choice(one: Continuation) -> dict[str, Any]:
    """A complete text as OpenAI's `choice`; `calm` has the fields of `Continuation`."""
    names = ("tokens", "chunk_ends", *_per_chunk(one), *_AT_THE_END)
    return {
        "index": one.index,
        "text": one.text,
        "logprobs": None,
        "finish_reason": _reason(one),
        "calm": {name: getattr(one, name) for name in names},
    }


def streamed_choice(piece: Piece) -> dict[str, Any]:
    """One chunk's part of a streamed text as OpenAI's `choice`; `calm` has the fields of `Continuation` for this chunk."""
    one, number = piece.continuation, piece.number
    first = one.chunk_ends[number - 1] if number else 0
    about: dict[str, Any] = {"tokens": one.tokens[first : one.chunk_ends[number]]}
    about |= {name: getattr(one, name)[number] for name in _per_chunk(one)}
    if piece.is_last:
        about |= {name: getattr(one, name) for name in _AT_THE_END}
    return {
        "index": one.index,
        "text": piece.text,
        "logprobs": None,
        "finish_reason": _reason(one) if piece.is_last else None,
        "calm": about,
    }


def failed() -> RequestError:
    """The response if the model raised an error."""
    return RequestError(500, "the model failed; the server's log says why", kind="server_error")


def as_json(error: RequestError) -> dict[str, Any]:
    """An error in the format of OpenAI's API."""
    about = {"message": error.message, "type": error.kind, "param": error.param, "code": None}
    return {"error": about}
