"""What clients and operators are told at the wrong moment, or with the wrong address."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest

from e2e.sdk import asking, sync_client
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from e2e.stub_engine import JSON, Script, StubEngine
from tests.waiting import WITHIN_S


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path) as launch:
        yield launch


def listening(gateway: Server) -> Server:
    """A gateway that need not be ready."""
    gateway.start()
    eventually(lambda: gateway.get("/health").status_code == 200)
    return gateway


def test_a_client_that_comes_before_the_engines_is_served(launch: Launcher) -> None:
    """A whole stack that restarts: the SDK tries again by itself, as the answer's Retry-After says."""
    engine = launch.engine("late")
    gateway = listening(launch.serve(engine.url))
    early = gateway.post("/v1/chat/completions", json=asking("hello"))
    assert (early.status_code, early.headers["retry-after"]) == (503, "1")
    threading.Timer(1.0, engine.start).start()
    with sync_client(gateway, max_retries=int(WITHIN_S)) as client:
        assert client.chat.completions.create(**asking("hello")).choices[0].message.content
        assert client.models.retrieve("demo").id == "demo"
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            client.chat.completions.create(**{**asking("hello"), "model": "other"})


def test_an_engine_that_wants_another_key_says_so(launch: Launcher) -> None:
    engine = launch.engine("locked", options=("--api-key", "right"))
    engine.start()
    engine.wait_until_ready()
    for key, reason in (("wrong", "refuses our key"), (None, "asks for a key")):
        options = () if key is None else ("--engine-api-key", key)
        gateway = listening(launch.serve(engine.url, *options, name=f"with-{key}"))
        name = engine.url.removeprefix("http://")
        eventually(lambda gateway=gateway, name=name: gateway.get("/ready").json()["out"][name]["health"] == "down")  # type: ignore[misc]
        out = gateway.get("/ready").json()["out"][name]
        assert out["cause"] == "refused_key"
        assert reason in out["last_error"]
        assert "refused_key" in gateway.log()
        gateway.stop()


def test_a_sole_engine_that_fails_is_asked_again_after_a_pause(launch: Launcher) -> None:
    with StubEngine() as stub:
        gateway = listening(launch.serve(stub.url))
        gateway.wait_until_ready()
        stub.script = Script([b'{"error": {"message": "out of order"}}'], 500, JSON)
        began_s = time.monotonic()
        with sync_client(gateway) as client, pytest.raises(openai.InternalServerError, match="out of order"):
            client.chat.completions.create(**asking("hello"))
        assert len(stub.received) == 3
        assert time.monotonic() - began_s > 1.0, "the pauses are 0.5 and 1 s, less a quarter"
        gateway.stop()


def test_a_wrong_address_is_told_the_right_one(launch: Launcher) -> None:
    gateway = listening(launch.serve("http://127.0.0.1:9"))
    without_v1 = openai.OpenAI(base_url=gateway.url, api_key="unused", max_retries=0)
    with without_v1, pytest.raises(openai.NotFoundError, match=r"Did you mean /v1/chat/completions\?"):
        without_v1.chat.completions.create(**asking("hello"))
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0)
    with claude, pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.batches.list()
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_launcher_without_its_engine_says_so_in_a_sentence(engine: str) -> None:
    command = [sys.executable, "-m", "plait.gateway.cli", engine, "--", "--model", "m", "--model-path", "m"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"plait {engine}: ")
    assert f"pip install 'plait[{engine}]'" in line
