"""A call that is ready to be placed and sent, and how its delivery ended."""

from __future__ import annotations

from typing import Protocol

import msgspec

from plait.backends.errors import EngineError
from plait.gateway.asgi import Headers
from plait.gateway.calls.answer_forms import COMPLETION, AnswerForm
from plait.gateway.calls.completion_text import TextTap
from plait.gateway.calls.outgoing import EngineBody
from plait.policy.types import Call


class HeldBytes(Protocol):
    """Where bytes count that are held for a call."""

    def hold(self, size_bytes: int) -> None:
        """Count this much more. Raises `PlaitError` beyond the limit."""

    def free(self, size_bytes: int) -> None:
        """Count this much less."""


class Delivery(msgspec.Struct, frozen=True):
    """A request to be placed and sent. The call's times count from `arrived_s`: its arrival, or when it was ready.

    `handle` names a call whose objectives may change on its way (`ChangedObjectives`). `session` is echoed in a header.
    `text` reads the completion's text, if it is needed. An answer that is not streamed counts in `held` while it comes.
    The engine `continues_on` has most of the prompt in its cache. The call failed on the engines in `avoids`; it goes
    there only if there is no other engine. The body has `prompts` prompts and asks for `choices` completions in all.
    The model's context is `context_tokens` long, None if it is not known. The answer has this `form`. Only engines that
    have the `route` may get it, if it is not None. It is a `turn_of` a session that the client has named, be it by
    `session` or in its own way; empty if it has named none. Its text becomes the variable `output`. It was held for
    `held_s` until its inputs had values.
    """

    call: Call
    path: str
    headers: Headers
    body: EngineBody
    arrived_s: float
    session: str | None = None
    text: TextTap | None = None
    held: HeldBytes | None = None
    continues_on: str | None = None
    avoids: frozenset[str] = frozenset()
    tenant: str = ""
    prompts: int = 1
    choices: int = 1
    context_tokens: int | None = None
    handle: str | None = None
    form: AnswerForm = COMPLETION
    route: str | None = None
    turn_of: str = ""
    output: str | None = None
    held_s: float | None = None


Problem = EngineError | str | None


class Outcome(msgspec.Struct, frozen=True):
    """How a delivered call ended.

    `problem` is None if the engine answered in full, with a text where one is read. It is an `EngineError` if the
    engine is at fault, so that another engine may succeed. `is_told` is False if the client was sent nothing at all.
    """

    engine_id: str
    problem: Problem = None
    is_told: bool = True
