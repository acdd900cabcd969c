"""The first minute with Plait: engines by their addresses, and nothing else."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.server_process import Server, eventually
from e2e.servers import Launcher

ROOT = Path(__file__).parents[1]
OTHER_TOKENIZER = ("--tokenizer", str(ROOT / "backends" / "tokenization" / "embedded"))
"""The embedded engine's files as if they were a model's: an engine offers what it has loaded of them."""


@pytest.fixture(params=[(), OTHER_TOKENIZER], ids=["embedded", "files"])
def engines(request: pytest.FixtureRequest, launch: Launcher) -> list[Server]:
    servers = [launch.engine(f"engine-{number}", time_scale=20, options=request.param) for number in (1, 2)]
    for server in servers:
        server.start()
    for server in servers:
        server.wait_until_ready()
    return servers


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Launcher(tmp_path) as launch:
        yield launch


def ask(gateway: Server, text: str) -> tuple[int, int]:
    """Predicted and reported cached tokens of a chat."""
    request = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = gateway.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return int(answer.headers["plait-cached-tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])


def test_a_gateway_needs_no_file(engines: list[Server], launch: Launcher, tmp_path: Path) -> None:
    saved = tmp_path / "saved.toml"
    gateway = launch.serve(*(engine.url for engine in engines), "--save", str(saved))
    gateway.start()
    gateway.wait_until_ready()
    ask(gateway, "hello " * 300)
    predicted, reported = ask(gateway, "hello " * 300)
    assert 0 <= reported - predicted < 64, "a tree block"
    assert predicted > 200
    eventually(saved.exists)
    config = tomllib.loads(saved.read_text())
    assert [engine["url"] for engine in config["engines"]] == [engine.url for engine in engines]
    assert [model["name"] for model in config["models"]] == ["demo"]

    again = launch.serve("--config", str(saved), name="again")
    again.start()
    again.wait_until_ready()
    ask(again, "hello again " * 300)
    assert ask(again, "hello again " * 300)[0] > 200


def test_two_engines_that_disagree_are_named_both(launch: Launcher) -> None:
    one, other = launch.engine("one"), launch.engine("other", options=("--tokenizer", "bytes"))
    for engine in (one, other):
        engine.start()
        engine.wait_until_ready()
    gateway = launch.serve(one.url, other.url)
    gateway.start()
    gateway.wait_until_ready()
    for number in range(20):
        text = f"{number} is a number. " * 9
        answer = gateway.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
        if answer.headers["plait-engine"] == other.url.removeprefix("http://"):
            assert answer.json()["usage"]["prompt_tokens"] == len(text), "it reads the text, a token a byte"
    names = [engine.url.removeprefix("http://") for engine in (one, other)]
    eventually(lambda: "degraded" in gateway.get("/ready").json())
    ((name, problem),) = gateway.get("/ready").json()["degraded"].items()
    assert name == names[1]
    assert f"that of engine {names[0]}" in problem
    assert "the vocabulary" in problem
