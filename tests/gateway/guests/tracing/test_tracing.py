"""Which calls are traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from plait.gateway import app
from plait.gateway.calls.call import NO_SLOT, Slot
from plait.gateway.config.sections import Config, TracingConfig
from plait.gateway.guests.tracing import tracing
from plait.gateway.guests.tracing.tracing import TracedCall, Tracing

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def made(**settings: Any) -> Tracing:
    nothing: Any = None
    return Tracing(TracingConfig(**settings), nothing, nothing, nothing, label=str, engine=nothing)


def begun(by: Tracing, call_id: str = "r", flag: str | None = None, **asked: Any) -> TracedCall | None:
    headers = [] if flag is None else [(b"traceparent", f"00-{TRACE}-{SPAN}-{flag}".encode())]
    given = {"tenant": "t", "slot": NO_SLOT, "session": None, **asked}
    delivery: Any = SimpleNamespace(
        asked=SimpleNamespace(headers=headers, call=SimpleNamespace(call_id=call_id), **given)
    )
    return by.begins(delivery)


def test_a_share_of_calls_without_a_parent_is_traced() -> None:
    by = made(sample=0.01, max_calls_per_s=10**6)
    traced = [call for number in range(10_000) if (call := begun(by, f"r{number}")) is not None]
    assert 60 <= len(traced) <= 150
    assert len({call.trace_id for call in traced}) == len(traced)
    assert not begun(made(sample=0.0))
    assert begun(made(sample=1.0))


@pytest.mark.parametrize(("flag", "is_traced"), [("01", True), ("03", True), ("00", False), ("02", False)])
def test_a_parent_decides(flag: str, is_traced: bool) -> None:
    call = begun(made(sample=1.0), flag=flag)
    assert (call is not None) is is_traced
    assert call is None or (call.trace_id, call.parent_id) == (int(TRACE, 16), int(SPAN, 16))


def test_no_more_than_so_many_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    by, now_s = made(sample=1.0, max_calls_per_s=3), [0.0]
    monkeypatch.setattr(tracing, "loop_time_s", lambda: now_s[0])
    assert sum(begun(by, f"r{number}") is not None for number in range(9)) == 3
    now_s[0] = 1.0
    assert begun(by) is not None


def test_the_calls_of_a_program_have_one_trace_and_one_parent() -> None:
    by = made(sample=1.0)
    first, second = (begun(by, f"r{number}", slot=Slot(), session="story") for number in range(2))
    other = begun(by, "r2", slot=Slot(), session="another")
    assert first is not None
    assert second is not None
    assert other is not None
    assert (first.trace_id, first.parent_id) == (second.trace_id, second.parent_id)
    assert first.span_id != second.span_id
    assert other.trace_id != first.trace_id
    again = begun(made(sample=1.0), "r0", slot=Slot(), session="story")
    assert again is not None
    same = again.trace_id, again.span_id, again.parent_id
    assert same == (first.trace_id, first.span_id, first.parent_id), "whoever takes it over goes on in its trace"


@pytest.mark.parametrize(
    ("endpoint", "variable", "is_there", "sends"),
    [
        (None, False, True, False),
        (None, True, True, True),
        (None, True, False, False),
        ("http://c:1", False, False, True),
    ],
)
def test_where_spans_are_sent(
    endpoint: str | None, variable: bool, is_there: bool, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> object:
        if not is_there:
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(app, "find_spec", find_spec)
    if variable:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:1")
    assert ("tracing" in app.guests_of(Config(tracing=TracingConfig(endpoint=endpoint)))) is sends
