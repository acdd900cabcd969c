"""A step of a program as a client has asked for it: by headers, by `/v1/submit` and `/v1/programs`, in the background.

All of them are prompts whose placeholders get values, with annotations. They differ in who reads the answer
(`ChainedCall` and its subclasses) and in how a request is read, now and from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from plait.backends.protocol.openai import ChatRequest, CompletionRequest
from plait.gateway.asgi import Headers
from plait.gateway.calls.annotations import Annotations
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.outgoing import FIELDS
from plait.gateway.guests.programs.core.held_call import CallOwner, HeldCall, KeptRequest, Output, with_condition
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.filled_prompts import Unfilled, fill_in, filled_sizes
from plait.gateway.guests.programs.submission import Submission
from plait.policy.types import CHARACTERS_PER_TOKEN

_KEYS = frozenset((b"api-key", b"authorization", b"cookie", b"proxy-authorization", b"x-api-key"))


def without_keys(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    """The headers without API keys, which must not be stored."""
    return tuple((name, value) for name, value in headers if name not in _KEYS)


@dataclass(frozen=True, slots=True)
class RequestPrompt:
    """The prompt of one request to an engine, parsed from `body`: of a call with headers, or of a response."""

    path: str
    body: bytes
    request: ChatRequest | CompletionRequest
    inputs: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def characters(self) -> int:
        return len(self.body)

    @property
    def output_tokens(self) -> int | None:
        return self.request.output_limit

    def space(self, number: int) -> str:  # noqa: ARG002 - as in `Submission`, also below
        return ""

    def unfilled(self, number: int, values: Mapping[str, str], texts: Sequence[str]) -> Unfilled:  # noqa: ARG002
        given = {name: values[name] for name in self.inputs}
        measure = partial(filled_sizes, self.request, given) if given else None
        return Unfilled(self.model, self.request.prompt_field, measure, partial(self._filled, given))

    def _filled(self, values: Mapping[str, str]) -> tuple[bytes, ChatRequest | CompletionRequest]:
        """The body with `values` in its prompt."""
        if not values:
            return self.body, self.request
        fields = FIELDS.decode(self.body)
        request = fill_in(fields, self.request, values)
        return msgspec.json.encode(fields), request


@dataclass(frozen=True, slots=True)
class AskedStep:
    """A parsed request for a step.

    A repetition has the same `fingerprint`; None: repetitions are not recognized. `kept` makes the request for the log;
    None: it need not be logged.
    """

    incoming: Incoming
    annotations: Annotations
    prompts: Submission | RequestPrompt
    fingerprint: bytes | None
    kept: Callable[[], KeptRequest] | None

    def held_call(self, session: Session, owner: CallOwner, *, is_answered: bool) -> HeldCall:
        """The step's call. The caller adds it to the session."""
        incoming, annotations, prompts = self.incoming, self.annotations, self.prompts
        return HeldCall(
            session.unused_id(incoming.request_id),
            with_condition(prompts.inputs, annotations.when),
            prompts.outputs,
            owner,
            prompts.model,
            when=annotations.when,
            slo=annotations.slo,
            objective=annotations.objective,
            prompt_tokens=prompts.characters // CHARACTERS_PER_TOKEN,
            output_tokens=prompts.output_tokens,
            held_bytes=len(incoming.body),
            fingerprint=self.fingerprint,
            is_answered=is_answered,
            request=self.kept,
        )
