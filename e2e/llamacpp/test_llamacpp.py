"""A gateway before real llama.cpp: `make e2e-llamacpp` builds its environment and runs this."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.llamacpp.environment import ENVIRONMENT
from e2e.ports import free_port
from e2e.server_process import Server, eventually
from e2e.servers import Launcher

SERVER: Final = Path(__file__).with_name("server.py")
SLOTS, CONTEXT_TOKENS = 2, 2048
ADMIN: Final = {"authorization": "Bearer sk-admin"}


class LlamaCpp(Server):
    """A server with two slots."""

    def __init__(self, folder: Path, *, metrics: bool) -> None:
        port = free_port()
        super().__init__("llamacpp", port, (), folder / "llamacpp.log", ready_path="/health")
        options = {"port": port, "folder": str(folder), "slots": SLOTS, "context_tokens": CONTEXT_TOKENS}
        self._command = [str(ENVIRONMENT.python), str(SERVER), json.dumps({**options, "metrics": metrics})]


@pytest.fixture(params=[True, False], ids=["metrics", "slots"])
def has_metrics(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def fleet(launch: Launcher, tmp_path: Path, has_metrics: bool) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        engine = LlamaCpp(tmp_path, metrics=has_metrics)
        engine.start()
        stack.callback(engine.stop)
        engine.wait_until_ready()
        models = [{"name": "demo", "tokenizer": "estimated"}]
        entries = [{"name": "llama", "url": engine.url}]
        gateway = launch.gateway(entries, models=models, server={"admin_key": "sk-admin"})
        gateway.start()
        gateway.wait_until_ready()
        yield gateway, engine


def asked(server: Server, prompt: str, max_tokens: int) -> Any:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return server.post("/v1/completions", json=body)


@contextmanager
def busy(engine: Server) -> Iterator[None]:
    """Others have more calls there than it has slots."""
    is_over = threading.Event()

    def ask(number: int) -> set[int]:
        statuses = set()
        while not is_over.is_set():
            statuses.add(asked(engine, f"{number}", 1_900).status_code)
        return statuses

    with ThreadPoolExecutor(4 * SLOTS) as others:
        calls = [others.submit(ask, number) for number in range(4 * SLOTS)]
        try:
            yield
        finally:
            is_over.set()
        assert [call.result() for call in calls] == [{200}] * len(calls)


def test_it_is_recognised_and_its_calls_are_counted(fleet: tuple[Server, Server], has_metrics: bool) -> None:
    gateway, engine = fleet

    def told() -> dict[str, Any]:
        return dict(gateway.get("/admin/engines/llama", headers=ADMIN).json())

    eventually(lambda: (told()["kind"], told()["models"]) == ("llamacpp", {"demo": CONTEXT_TOKENS}))
    assert asked(gateway, "Hello", 4).json()["usage"]["completion_tokens"] == 4
    with busy(engine):
        eventually(lambda: gateway.metric("plait_engine_running_calls", engine="llama") == SLOTS)
        if has_metrics:
            eventually(lambda: gateway.metric("plait_engine_waiting_calls", engine="llama") > 0)
        assert asked(gateway, "Hello", 4).status_code == 200, "it waits there, and is served"
    eventually(lambda: gateway.metric("plait_engine_running_calls", engine="llama") == 0)


def test_a_prompt_that_is_too_long_is_refused(fleet: tuple[Server, Server]) -> None:
    """By the engine, which counts its tokens."""
    refused = asked(fleet[0], "x" * 3 * CONTEXT_TOKENS, 1)
    assert refused.status_code == 400
    assert "exceeds the available context size" in refused.json()["error"]["message"]
