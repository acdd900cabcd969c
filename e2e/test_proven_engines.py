"""Engines that are not as the gateway has them: named within seconds of their start, and no longer once they are."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from e2e.delaying_proxy import DelayingProxy
from e2e.server_process import Server, eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

SHIPPED: Final = Path(__file__).parents[1] / "backends" / "tokenization" / "embedded"


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path) as launch:
        yield launch


def ready(server: Server) -> Server:
    server.start()
    server.wait_until_ready()
    return server


def with_other(folder: Path, change: Callable[[str], str]) -> Path:
    """The shipped tokenizer's files, one of them changed."""
    folder.mkdir()
    for file in SHIPPED.iterdir():
        text = file.read_text(encoding="utf-8")
        (folder / file.name).write_text(change(text) if file.name == "chat_template.jinja" else text, encoding="utf-8")
    return folder


def again(engine: Server, tmp_path: Path, options: Sequence[str]) -> Server:
    """Another process at an engine's address."""
    arguments = ["engine", "--port", str(engine.port), "--name", engine.name, "--model", "demo", *options]
    return Server(f"{engine.name}-again", engine.port, arguments, tmp_path / "again.log", ready_path="/health")


def degraded(gateway: Server) -> str | None:
    problem: str | None = gateway.get("/ready").json().get("degraded", {}).get("demo-1")
    return problem


@pytest.mark.parametrize("stock", [(), ("--stock",)], ids=["adapter", "stock"])
@pytest.mark.parametrize("wrong", ["tokenizer", "template"])
def test_what_differs_is_named_until_it_does_not(
    launch: Launcher, tmp_path: Path, wrong: str, stock: Sequence[str]
) -> None:
    template = with_other(tmp_path / "other", lambda text: text.replace("<|im_start|>", "<|im_start|> "))
    options = {
        "tokenizer": ("--tokenizer", "bytes"),
        "template": ("--tokenizer", str(template)),
    }
    engine = ready(launch.engine("demo-1", options=(*options[wrong], *stock)))
    gateway = launch.gateway([engine])
    gateway.start()
    eventually(lambda: gateway.metric("plait_engine_up") == 1)
    eventually(lambda: degraded(gateway) is not None)
    assert gateway.metric("plait_engine_degraded", engine="demo-1") == 1
    engine.stop()
    eventually(lambda: gateway.metric("plait_engine_up") == 0)
    right = again(engine, tmp_path, stock)
    try:
        ready(right)
        eventually(lambda: gateway.metric("plait_engine_up") == 1 and degraded(gateway) is None)
    finally:
        right.stop()


def test_an_answer_tells_of_a_template_that_nothing_else_tells_of(launch: Launcher, tmp_path: Path) -> None:
    """The first call's count of prompt tokens is enough."""
    engine = ready(launch.engine("demo-1", options=("--stock",)))
    (tmp_path / "other.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[[models]]\nname = "demo"\ntokenizer = "embedded"\nchat_template = "other.jinja"\n'
        f'[[engines]]\nname = "demo-1"\nurl = "{engine.url}"\n'
    )
    gateway = ready(launch.serve("--config", str(config)))
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    assert gateway.post("/v1/chat/completions", json=body).status_code == 200
    problem = degraded(gateway)
    assert problem is not None
    assert "tokens in a prompt in which the gateway counts" in problem


def test_a_salt_that_does_not_reach_the_engine_is_named(launch: Launcher, tmp_path: Path) -> None:
    """A proxy before the engine loses it, so the engine's cache is not the tenant's."""
    engine = ready(launch.engine("demo-1"))

    def asks(content: str) -> None:
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        answer = gateway.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
        assert answer.status_code == 200

    with DelayingProxy(engine.port, 0.0, spoils=b"cache_salt") as proxy:
        config = tmp_path / "config.toml"
        config.write_text(
            '[server]\napi_keys = ["k"]\nisolate_tenants = true\n'
            f'[[models]]\nname = "demo"\n[[engines]]\nname = "demo-1"\nurl = "{proxy.url}"\n'
        )
        gateway = ready(launch.serve("--config", str(config)))
        times, ends_s = 0, time.monotonic() + WITHIN_S
        while (problem := degraded(gateway)) is None and time.monotonic() < ends_s:
            asks("One long question. " * 200)
            for other in range(2):  # each has a report of its blocks, and the second tells of all before it
                asks(f"Another one, number {times}, {other}: " + "what is there to say? " * 20)
                time.sleep(0.3)
            times += 1
    assert problem is not None
    assert times >= 4
    assert "its reports say 0" in problem


def test_a_configuration_can_be_asked_of_its_engines(launch: Launcher) -> None:
    engines = [
        ready(launch.engine("good")),
        ready(launch.engine("locked", options=("--api-key", "k"))),
        ready(launch.engine("other", options=("--stock", "--tokenizer", "bytes"))),
    ]
    command = [sys.executable, "-m", "plait.gateway.cli", "check-config", "--probe"]
    good = subprocess.run([*command, engines[0].url], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    urls = [*(engine.url for engine in engines), "http://127.0.0.1:9"]
    found = subprocess.run([*command, *urls], capture_output=True, text=True, check=False, timeout=WITHIN_S)
    lines = {line.split()[0].removesuffix(":"): line.split() for line in found.stdout.splitlines()[1:5]}
    named = [lines[url.removeprefix("http://")] for url in urls]
    assert [row[1:3] for row in named] == [["yes", "taken"], ["yes", "refused"], ["yes", "taken"], ["no", "-"]]
    assert named[0][5:] == ["agrees", "agrees", "reported"]
    assert named[2][5] == "differs"
    assert "asks for a key" in found.stdout
    assert found.returncode == 2
    assert "3 engines of 4 cannot be used" in found.stderr
