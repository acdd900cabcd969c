"""A gateway before an engine with another tokenizer, which is then started again with the right one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from plait.backends.tokenization.loading import load_tokenizer

TEXT: Final = "The quick brown fox jumps over the lazy dog. " * 12


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path) as launch:
        yield launch


def start(server: Server) -> None:
    server.start()
    server.wait_until_ready()


def prompt_tokens(gateway: Server) -> int:
    """How many tokens the engine has read."""
    answer = gateway.post("/v1/completions", json={"model": "demo", "prompt": TEXT, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens"])


def test_it_gets_texts_until_it_has_the_gateways_tokenizer(launch: Launcher, tmp_path: Path) -> None:
    engine = launch.engine("demo-1", options=("--tokenizer", "bytes"))
    start(engine)
    gateway = launch.gateway([engine])
    start(gateway)
    eventually(lambda: "degraded" in gateway.get("/ready").json())
    assert "the vocabulary" in gateway.get("/ready").json()["degraded"]["demo-1"]
    assert gateway.metric("plait_engine_reports", engine="demo-1") == 0
    assert prompt_tokens(gateway) == len(TEXT.encode()), "each byte is a token there"

    engine.stop()
    eventually(lambda: gateway.metric("plait_engine_up", engine="demo-1") == 0)
    arguments = ["engine", "--port", str(engine.port), "--name", "demo-1", "--model", "demo"]
    again = Server("demo-1-again", engine.port, arguments, tmp_path / "again.log", ready_path="/health")
    try:
        start(again)
        eventually(lambda: gateway.metric("plait_engine_reports", engine="demo-1") == 1)
        assert "degraded" not in gateway.get("/ready").json()
        assert prompt_tokens(gateway) == len(load_tokenizer("embedded").encode(TEXT))
        told = [line for line in gateway.log().splitlines() if "token ids" in line]
        assert ["token ids not sent" in line for line in told] == [True, False], "one warning, and that it is over"
    finally:
        again.stop()
