"""The spans of an ended call and of a program, made of their records in the exporter's thread.

Names are those of OpenTelemetry's semantic conventions 1.44 for HTTP and GenAI (the latter in development); what they
have no name for begins with `plait.`. No span has a text of a prompt, an answer, a tool, a variable or a schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from plait.gateway.guests.receipts.receipt import Choice, Receipt
from plait.gateway.guests.tracing.context import digest

OPERATIONS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat",
    "/v1/completions": "text_completion", "/v1/embeddings": "embeddings",
}  # fmt: skip
"""By path: `gen_ai.operation.name`."""

ATTRIBUTES: Final = frozenset((
    "http.request.method", "http.route", "http.response.status_code", "error.type", "server.address", "server.port",
    "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.conversation.id",
    "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens",
    "gen_ai.usage.cache_read.input_tokens",
    "plait.request_id", "plait.tenant", "plait.outcome", "plait.wait", "plait.engine", "plait.placement",
    "plait.expected_cached_tokens", "plait.candidates", "plait.ttft_s", "plait.output", "plait.program",
))  # fmt: skip
"""All attributes. `gen_ai.usage.*` is on attempts only, so that nobody counts tokens twice."""

_FLAGS: Final = TraceFlags(TraceFlags.SAMPLED)
_SCOPE: Final = InstrumentationScope("plait")

Value = str | int | float | tuple[str, ...]


class EndedCall(NamedTuple):
    """What the spans of a call are made of. `parent_id` is 0 for the first span of a trace."""

    receipt: Receipt
    trace_id: int
    span_id: int
    parent_id: int
    tenant: str
    conversation: str
    engines: Mapping[str, tuple[str, str, int]]
    """By name: an engine's software, host and port."""

    output: str | None = None
    inputs: Sequence[int] = ()
    """The spans of the calls that made its inputs."""


class EndedProgram(NamedTuple):
    """A program's calls have ended, in seconds from 1970."""

    session: str
    tenant: str
    trace_id: int
    span_id: int
    parent_id: int
    began_s: float
    ended_s: float


def spans_of(ended: EndedCall | EndedProgram, resource: Resource) -> Iterator[ReadableSpan]:
    return _Spans(ended.trace_id, resource).of(ended)


def attempt_id(trace_id: int, request_id: str, number: int) -> int:
    """The span of a call's attempt, from 0 on. The engine's spans hang below it."""
    return digest(trace_id, request_id, number)


class _Spans(NamedTuple):
    trace_id: int
    resource: Resource

    def of(self, ended: EndedCall | EndedProgram) -> Iterator[ReadableSpan]:
        if isinstance(ended, EndedProgram):
            given: dict[str, Value | None] = {
                "plait.program": ended.session,
                "gen_ai.conversation.id": ended.session,
                "plait.tenant": ended.tenant or None,
            }
            yield self._span("plait.program", ended.span_id, ended.parent_id, (ended.began_s, ended.ended_s), given)
            return
        receipt, span_id = ended.receipt, ended.span_id
        yield self._call(ended)
        since_s = receipt.at
        for wait in receipt.waits:
            until_s = min(since_s + wait.for_s, receipt.at + receipt.e2e_s)
            own_id = digest(span_id, "wait", wait.why, since_s)
            yield self._span(f"plait.wait {wait.why}", own_id, span_id, (since_s, until_s), {"plait.wait": wait.why})
            since_s = until_s
        sent = [choice for choice in receipt.choices if choice.sent_s is not None]
        for number, choice in enumerate(sent):
            yield self._attempt(ended, choice, number, sent[number + 1 :])

    def _call(self, ended: EndedCall) -> ReadableSpan:
        receipt = ended.receipt
        choice = receipt.choices[-1] if receipt.choices else None
        given: dict[str, Value | None] = {
            "http.request.method": "POST",
            "http.route": receipt.path,
            "http.response.status_code": receipt.status,
            "gen_ai.operation.name": OPERATIONS.get(receipt.path),
            "gen_ai.provider.name": "plait",
            "gen_ai.request.model": receipt.model,
            "gen_ai.conversation.id": ended.conversation or None,
            "error.type": receipt.code,
            "plait.request_id": receipt.request_id,
            "plait.tenant": ended.tenant or None,
            "plait.outcome": receipt.outcome,
            "plait.engine": None if choice is None else choice.engine,
            "plait.placement": None if choice is None else choice.reason,
            "plait.expected_cached_tokens": None if choice is None else choice.cached_tokens,
            "plait.candidates": None if choice is None else choice.engines,
            "plait.ttft_s": receipt.first_s,
            "plait.output": ended.output,
        }
        times = receipt.at, receipt.at + receipt.e2e_s
        links = [Link(self._context(one)) for one in ended.inputs]
        return self._span(
            f"POST {receipt.path}", ended.span_id, ended.parent_id, times, given,
            kind=SpanKind.SERVER, links=links, is_error=receipt.status >= 500,
        )  # fmt: skip

    def _attempt(self, ended: EndedCall, choice: Choice, number: int, later: Sequence[Choice]) -> ReadableSpan:
        receipt, engine = ended.receipt, ended.engines.get(choice.engine)
        until_s = (later[0].placed_s if later else None) or receipt.e2e_s
        failed = choice.ended_by or (receipt.code if not later and receipt.outcome not in {"ok", "client_gone"} else "")
        operation = OPERATIONS.get(receipt.path, "request")
        given: dict[str, Value | None] = {
            "gen_ai.operation.name": operation,
            "gen_ai.request.model": receipt.model,
            "plait.engine": choice.engine,
            "error.type": failed or None,
        }
        if engine is not None:
            kind, host, port = engine
            given |= {"gen_ai.provider.name": kind, "server.address": host, "server.port": port}
        if not later and receipt.output_tokens is not None:
            given |= {
                "gen_ai.usage.input_tokens": receipt.prompt_tokens,
                "gen_ai.usage.output_tokens": receipt.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": receipt.cached_tokens,
                "gen_ai.response.finish_reasons": None if receipt.finish_reason is None else (receipt.finish_reason,),
            }
        times = receipt.at + (choice.sent_s or 0.0), receipt.at + until_s
        own_id = attempt_id(self.trace_id, receipt.request_id, number)
        name = f"{operation} {receipt.model}"
        return self._span(name, own_id, ended.span_id, times, given, kind=SpanKind.CLIENT, is_error=bool(failed))

    def _span(
        self,
        name: str,
        own_id: int,
        parent_id: int,
        times: tuple[float, float],
        given: Mapping[str, Value | None],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        is_error: bool = False,
    ) -> ReadableSpan:
        began_ns, ended_ns = (int(time_s * 1e9) for time_s in times)
        return ReadableSpan(
            name,
            self._context(own_id),
            self._context(parent_id, is_remote=True) if parent_id else None,
            self.resource,
            {key: value for key, value in given.items() if value is not None},
            links=links,
            kind=kind,
            status=Status(StatusCode.ERROR if is_error else StatusCode.UNSET),
            start_time=began_ns,
            end_time=max(began_ns, ended_ns),
            instrumentation_scope=_SCOPE,
        )

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self.trace_id, span_id, is_remote, _FLAGS)
