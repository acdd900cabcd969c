"""Spans of calls and programs, as a collector gets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.otlp_receiver import Receiver, attributes, receiving
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import JSON, Script, StubEngine
from plait.gateway.guests.tracing.spans import ATTRIBUTES
from tests.waiting import WITHIN_S

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CHAT: dict[str, Any] = {
    "model": "demo", "messages": [{"role": "user", "content": "SECRET-7 How far is the moon?"}], "max_tokens": 8,
}  # fmt: skip

WHOLE = json.dumps({
    "object": "chat.completion", "model": "demo",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Far."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
}).encode()  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def started(launch: Launcher, receiver: Receiver, **sections: Any) -> Server:
    engine = launch.engine("a")
    gateway = launch.gateway([engine], tracing={"endpoint": receiver.url, "sample": 0.0}, **sections)
    for server in (engine, gateway):
        server.start()
        server.wait_until_ready()
    return gateway


def asked(gateway: Server, path: str, body: Any, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{gateway.url}{path}", json=body, headers=names, timeout=WITHIN_S, trust_env=False)


def test_a_call_is_below_its_clients_span_and_the_engine_below_the_attempts(
    launch: Launcher, receiver: Receiver
) -> None:
    gateway = started(launch, receiver)
    assert asked(gateway, "/v1/chat/completions", CHAT, **SAMPLED).status_code == 200
    (call,) = receiver.wait_for("POST /v1/chat/completions")
    (attempt,) = receiver.wait_for("chat demo")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert (attempt.trace_id, attempt.parent_span_id) == (call.trace_id, call.span_id)
    told, sent = attributes(call), attributes(attempt)
    assert (told["gen_ai.provider.name"], told["plait.engine"]) == ("plait", "a")
    assert not [name for name in told if name.startswith("gen_ai.usage")]
    assert sent["gen_ai.usage.output_tokens"] == 8
    assert call.start_time_unix_nano <= attempt.start_time_unix_nano < attempt.end_time_unix_nano
    assert {*told, *sent} <= ATTRIBUTES
    assert b"SECRET-7" not in b"".join(span.SerializeToString() for span in receiver.spans)


def test_the_engine_gets_the_attempts_span_and_calls_that_are_not_sampled_pass(
    launch: Launcher, receiver: Receiver
) -> None:
    with StubEngine() as engine:
        engine.script = Script([WHOLE], headers=JSON)
        engines = [{"name": "a", "url": engine.url}]
        gateway = launch.gateway(engines, tracing={"endpoint": receiver.url, "sample": 0.0})
        gateway.start()
        gateway.wait_until_ready()
        other = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        for headers in (SAMPLED, other, {}):
            asked(gateway, "/v1/chat/completions", CHAT, **headers)
        (attempt,) = receiver.wait_for("chat demo")
        sent = [request.headers.get("traceparent") for request in engine.received]
    assert sent == [f"00-{TRACE}-{attempt.span_id.hex()}-01", other["traceparent"], None]
    assert len(receiver.named("POST")) == 1


def wait_until_recovered(gateway: Server) -> None:
    """Wait until requests of programs get no 503, which would have a span, too."""
    eventually(lambda: gateway.get("/v1/sessions/none").status_code == 404)


def test_a_programs_calls_are_linked_along_its_variables_also_after_a_kill(
    launch: Launcher, receiver: Receiver, tmp_path: Path
) -> None:
    gateway = started(launch, receiver, store={"path": str(tmp_path / "store" / "s.db")})
    wait_until_recovered(gateway)
    program = {
        "session": "story",
        "calls": [
            {"model": "demo", "prompt": "Name a town.{{town}}", "max_tokens": 4,
             "placeholders": [{"name": "town", "in_out": True, "semantic_var_id": "town"}]},
            {"model": "demo", "prompt": "Praise {{town}}:{{praise}}", "max_tokens": 4,
             "placeholders": [{"name": "town", "semantic_var_id": "town"},
                              {"name": "praise", "in_out": True, "semantic_var_id": "praise"}]},
        ],
        "gets": {"praise": None},
    }  # fmt: skip
    assert asked(gateway, "/v1/programs", program, **SAMPLED).status_code == 200
    first, second = sorted(receiver.wait_for("POST", 2), key=lambda span: span.start_time_unix_nano)
    assert [link.span_id for link in second.links] == [first.span_id]
    assert first.parent_span_id == second.parent_span_id
    gateway.kill()
    gateway.start()
    gateway.wait_until_ready()
    wait_until_recovered(gateway)
    later = {"model": "demo", "prompt": "Blame {{praise}}:{{blame}}", "max_tokens": 4, "session_id": "story",
             "placeholders": [{"name": "praise", "semantic_var_id": "praise"},
                              {"name": "blame", "in_out": True, "semantic_var_id": "blame"}]}  # fmt: skip
    asked(gateway, "/v1/submit", later, **SAMPLED).raise_for_status()
    third = receiver.wait_for("POST", 3)[-1]
    assert (third.trace_id.hex(), third.parent_span_id) == (TRACE, first.parent_span_id)
    assert [link.span_id for link in third.links] == [second.span_id]
    httpx.delete(f"{gateway.url}/v1/sessions/story", timeout=WITHIN_S, trust_env=False).raise_for_status()
    (whole,) = receiver.wait_for("plait.program")
    assert (whole.span_id, whole.parent_span_id.hex()) == (first.parent_span_id, PARENT)


def test_a_dead_collector_is_counted_and_costs_nobody_an_answer(launch: Launcher) -> None:
    with receiving() as gone:
        url = gone.url
    engine = launch.engine("a")
    gateway = launch.gateway([engine], tracing={"endpoint": url, "sample": 1.0})
    for server in (engine, gateway):
        server.start()
        server.wait_until_ready()
    assert [asked(gateway, "/v1/chat/completions", CHAT).status_code for _ in range(5)] == [200] * 5
    eventually(lambda: gateway.metric("plait_spans_dropped_total") == 5)
