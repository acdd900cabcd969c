"""Trials: completions of two tokens that show whether an engine computes. They use the connections of calls."""

from __future__ import annotations

from secrets import token_hex
from typing import Any, Final

import msgspec

from plait.backends.errors import EngineError, EngineStatusError
from plait.gateway.answers.completions import CompletionStream, decode, endings, garbled, given_up
from plait.gateway.fleet.booking import TRIAL_TOKENS
from plait.gateway.fleet.health import Offer
from plait.gateway.membership.engine_link import TOO_EARLY, EngineLink, retry_after_s

MAX_BYTES: Final = 2**20
ID: Final = "plait-trial"
"""The prefix of a trial's request id. The rest is random, because some engines refuse an id twice."""

_COMPLETIONS: Final = "/completions"
_CHAT: Final = "/chat/completions"
_NO_ROUTE: Final = frozenset((404, 405))


async def try_engine(engine_id: str, link: EngineLink, offer: Offer, *, streamed: bool) -> bool:
    """Whether the engine has computed two tokens; False if it refuses the request.

    Raises the `EngineError` of an engine that fails. Has no time-out: an engine that hangs never answers.
    """
    asked: dict[str, Any] = {"model": offer.trial_model, "max_tokens": TRIAL_TOKENS, "stream": streamed}
    prompt, messages = {"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello"}]}
    status = 404 if offer.has(_COMPLETIONS) is False else await _ask(engine_id, link, _COMPLETIONS, asked | prompt)
    if status in _NO_ROUTE and offer.has(_CHAT) is not False:
        status = await _ask(engine_id, link, _CHAT, asked | messages)
    return status == 200


async def _ask(engine_id: str, link: EngineLink, route: str, fields: dict[str, Any]) -> int:
    """The status of the answer. Raises `EngineError` for one that is the engine's fault, or not whole."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", f"{ID}-{token_hex(8)}".encode()), *link.rank]
    if link.authorization is not None:
        headers.append((b"authorization", link.authorization))
    response = await link.client.request("POST", f"/v1{route}", headers, msgspec.json.encode(fields))
    try:
        answer = await response.read(MAX_BYTES)
    finally:
        response.abort()
    status = response.status
    if status in TOO_EARLY or status >= 500 or link.refused_ours(status, clients=True):
        message = f"engine {engine_id} answered with status {status}"
        raise EngineStatusError(message, status, retry_after_s=retry_after_s(response.headers))
    problem = _problem(engine_id, answer, streamed=fields["stream"]) if status == 200 else None
    if isinstance(problem, EngineError):
        raise problem
    return status


def _problem(engine_id: str, answer: bytes, *, streamed: bool) -> EngineError | str | None:
    """Why the answer to a trial is not a whole completion."""
    if streamed:
        stream = CompletionStream(engine_id, withhold=False)
        stream.feed(answer)
        stream.end()
        return stream.problem
    body = decode(answer)
    if body is None or not body.choices:
        return garbled(engine_id, "an answer without choices")
    return given_up(engine_id, [reason for _, reason in endings(body)])
