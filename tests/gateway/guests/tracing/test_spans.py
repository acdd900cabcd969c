"""Which calls are traced, and the spans of their records."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.semconv import attributes
from opentelemetry.semconv._incubating import attributes as incubating
from opentelemetry.trace import SpanKind

from plait.gateway.guests.receipts.receipt import Choice, EndedWait, Receipt
from plait.gateway.guests.tracing.context import Parent, parent_of, with_parent
from plait.gateway.guests.tracing.spans import ATTRIBUTES, EndedCall, EndedProgram, attempt_id, spans_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RESOURCE = Resource.create({})


def choice(engine: str, placed_s: float, ended_by: str = "") -> Choice:
    return Choice(engine, "least_delay", "cache", placed_s, placed_s + 0.1, 64, 1.0, engines=2, ended_by=ended_by)


def ended(*choices: Choice, **fields: Any) -> EndedCall:
    given: dict[str, Any] = {
        "prompt_tokens": 90, "cached_tokens": 64, "output_tokens": 7, "finish_reason": "stop", "e2e_s": 3.0, **fields,
    }  # fmt: skip
    receipt = Receipt("t", "r1", 100.0, "/v1/chat/completions", "m", 200, "ok", choices=choices, **given)
    return EndedCall(receipt, int(TRACE, 16), 5, 3, "gold", "talk", {"a": ("vllm", "10.0.0.1", 8000)}, "town", [9])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"00-{TRACE}-{SPAN}-01", Parent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-00", Parent(int(TRACE, 16), int(SPAN, 16), False)),
        (f"cc-{TRACE}-{SPAN}-03-later", Parent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        ("nonsense", None),
    ],
)
def test_a_parent(given: str, expected: Parent | None) -> None:
    assert parent_of(given.encode()) == expected


def test_the_engine_gets_its_attempts_span_and_all_other_headers() -> None:
    sent = with_parent([(b"traceparent", b"x"), (b"tracestate", b"a=1")], int(TRACE, 16), 2)
    assert [*sent] == [(b"tracestate", b"a=1"), (b"traceparent", f"00-{TRACE}-{2:016x}-01".encode())]


def test_a_call_that_a_second_engine_answered() -> None:
    call = ended(choice("b", 0.5, "closed"), choice("a", 1.0), waits=(EndedWait("room", 0.4),))
    server, wait, first, second = spans_of(call, RESOURCE)
    assert [span.kind for span in (server, wait, first, second)] == [
        SpanKind.SERVER, SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.CLIENT,
    ]  # fmt: skip
    assert (server.start_time, server.end_time) == (100 * 10**9, 103 * 10**9)
    assert [link.context.span_id for link in server.links] == [9]
    assert [span.parent.span_id for span in (server, wait, first, second) if span.parent] == [3, 5, 5, 5]
    assert [span.context.span_id for span in (first, second)] == [attempt_id(call.trace_id, "r1", n) for n in (0, 1)]
    told, failed, answered = (dict(span.attributes or {}) for span in (server, first, second))
    assert (failed["error.type"], "gen_ai.usage.output_tokens" in failed) == ("closed", False)
    assert (answered["server.address"], answered["gen_ai.usage.cache_read.input_tokens"]) == ("10.0.0.1", 64)
    assert (told["plait.output"], told["gen_ai.conversation.id"]) == ("town", "talk")
    assert {*told, *failed, *answered, *(wait.attributes or {})} <= ATTRIBUTES


def test_a_call_that_was_never_sent_and_a_program() -> None:
    (refused,) = spans_of(ended(), RESOURCE)
    assert refused.kind is SpanKind.SERVER
    (program,) = spans_of(EndedProgram("story", "gold", 1, 2, 0, 10.0, 12.5), RESOURCE)
    assert (program.parent, program.start_time, program.end_time) == (None, 10 * 10**9, 12_500_000_000)
    assert {*(program.attributes or {})} <= ATTRIBUTES


def test_names_are_those_of_the_conventions() -> None:
    published = {
        value
        for package in (attributes, incubating)
        for module in iter_modules(package.__path__, f"{package.__name__}.")
        for value in vars(import_module(module.name)).values()
        if isinstance(value, str)
    }
    assert not {name for name in ATTRIBUTES if not name.startswith("plait.")} - published
