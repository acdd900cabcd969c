"""A real engine goes on with the trace of a call: its span hangs below the gateway's attempt."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

import httpx
import pytest

from e2e.otlp_receiver import receiving
from e2e.real_engines.engine import MODEL, EngineKind, started
from e2e.real_engines.fleet import new_gateway
from e2e.server_process import eventually
from tests.waiting import WITHIN_S

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
FLAGS: Final[dict[str, tuple[str, ...]]] = {"vllm": (), "sglang": ("--enable-trace",)}
REQUEST: Final = {"vllm": "llm_request", "sglang": " Req "}
"""With what the name of an engine's span of a request begins."""


@pytest.mark.usefixtures("reference")
def test_the_engines_span_is_below_the_attempt(kind: EngineKind, python: Path, model: Path, folder: Path) -> None:
    with receiving() as receiver, ExitStack() as stack:
        engine = kind.stock("traced", python, model, folder)
        engine.add_flags((*FLAGS[kind.name], "--otlp-traces-endpoint", receiver.url))
        engine.set_variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        stack.enter_context(started((engine,)))
        gateway = new_gateway("traced-gateway", {"traced": engine}, model, folder, tracing={"endpoint": receiver.url})
        stack.callback(gateway.stop)
        gateway.start()
        gateway.wait_until_ready()
        asked = {"model": MODEL, "prompt": "A trace of", "max_tokens": 4}
        headers = {"traceparent": PARENT}
        httpx.post(f"{gateway.url}/v1/completions", json=asked, headers=headers, timeout=WITHIN_S).raise_for_status()
        (attempt,) = receiver.wait_for(f"text_completion {MODEL}")
        eventually(
            lambda: any(
                (span.trace_id, span.parent_span_id) == (attempt.trace_id, attempt.span_id)
                for span in receiver.named(REQUEST[kind.name])  # an engine has requests of its own, too
            )
        )
