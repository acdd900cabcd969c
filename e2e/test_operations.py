"""Starting, stopping and watching a gateway."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from e2e.ports import free_port
from e2e.sdk import Sdk, asking, async_client, sync_client
from e2e.server_process import PLAIT, STOPPED_BY_SIGTERM, Server, eventually
from e2e.servers import Fleet, Launcher
from tests.waiting import SLOWNESS, WITHIN_S

LONG = round(2_000 * SLOWNESS)
"""Tokens of an answer that is not over while a gateway stops, on a busy machine too."""
ENGINES = '[[engines]]\nurl = "http://127.0.0.1:1"\n'


def test_health_and_readiness(fleet: Fleet) -> None:
    assert fleet.gateway.get("/health").json() == {"status": "ok"}
    ready = fleet.gateway.get("/ready")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "engines_up": {"demo": 2, "small": 1}})


def test_a_gateway_waits_for_its_engines(launch: Launcher) -> None:
    engine = launch.engine("late")
    gateway = launch.gateway([engine])
    gateway.start()
    eventually(lambda: gateway.get("/health").status_code == 200)
    ready = gateway.get("/ready")
    answer = ready.json()
    out = answer.pop("out")["late"]
    assert (ready.status_code, answer) == (503, {"ready": False, "engines_up": {"demo": 0}})
    assert out["health"] in {"untried", "down"}
    with sync_client(gateway) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**asking("Is anybody there?"))
        assert (caught.value.status_code, caught.value.code) == (503, "no_engine_available")
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError, match="no answer so far from late"):
            client.chat.completions.create(**(asking("Hello.") | {"model": "nope"}))

        engine.start()
        gateway.wait_until_ready()
        assert client.chat.completions.create(**asking("Is anybody there?")).choices
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**(asking("Hello.") | {"model": "nope"}))


def test_a_model_whose_only_engine_is_down_is_unavailable(launch: Launcher) -> None:
    engine = launch.engine("alone")
    gateway = launch.gateway([engine])
    Fleet(gateway, {engine.name: engine}).start()
    engine.kill()
    with sync_client(gateway) as client:
        # Whether the gateway has noticed by itself or learns it from this call makes no difference.
        for _ in range(2):
            with pytest.raises(openai.InternalServerError) as caught:
                client.chat.completions.create(**asking("Hello."))
            assert (caught.value.status_code, caught.value.code) == (503, "no_engine_available")
        eventually(lambda: gateway.get("/ready").status_code == 503)
        assert gateway.get("/health").status_code == 200
        assert [model.id for model in client.models.list()] == ["demo"]  # it still is what the fleet serves


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_sigterm_lets_running_calls_end(fleet: Fleet, launch: Launcher, stream: bool) -> None:
    engine = fleet.engines["demo-1"]
    gateway = launch.gateway([engine], server={"shutdown_grace_s": WITHIN_S})
    await asyncio.to_thread(start, gateway)
    sdk = Sdk(async_client(gateway))
    request = asking("Do not hurry.", max_tokens=LONG, stream=stream, extra_body={"ignore_eos": True})
    call = asyncio.create_task(sdk.chat(**request))
    await asyncio.to_thread(eventually, lambda: engine.metric("plait_engine_calls_running") == 1)
    gateway.terminate()
    await asyncio.to_thread(eventually, lambda: refuses(gateway))
    assert not call.done()
    answer = await call
    if stream:
        assert len(answer) == LONG + 1
        assert answer[-1].choices[0].finish_reason == "length"
    else:
        assert answer.usage.completion_tokens == LONG
    await sdk.close()
    assert await asyncio.to_thread(gateway.wait) in STOPPED_BY_SIGTERM


async def test_a_call_that_outlasts_the_grace_is_cut_and_freed(fleet: Fleet, launch: Launcher) -> None:
    engine = fleet.engines["demo-1"]
    gateway = launch.gateway([engine], server={"shutdown_grace_s": 1})
    await asyncio.to_thread(start, gateway)
    async with async_client(gateway) as client:
        request = asking("Go on for ever.", max_tokens=50_000, stream=True, extra_body={"ignore_eos": True})
        stream = await client.chat.completions.create(**request)
        gateway.terminate()
        with pytest.raises(openai.APIError, match="The gateway is stopping"):
            await asyncio.wait_for(exhaust(stream), WITHIN_S)
    assert await asyncio.to_thread(gateway.wait) in STOPPED_BY_SIGTERM
    await asyncio.to_thread(eventually, lambda: engine.metric("plait_engine_calls_running") == 0)


async def exhaust(stream: AsyncStream[ChatCompletionChunk]) -> None:
    async for _ in stream:
        pass


def start(server: Server) -> None:
    server.start()
    server.wait_until_ready()


def refuses(server: Server) -> bool:
    """Whether it takes no connection any more."""
    try:
        server.get("/health")
    except httpx.ConnectError:
        return True
    return False


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[server]\nprot = 1\n" + ENGINES, ['"server.prot"', 'did you mean "server.port"?']),
        ("[placemnt]\n" + ENGINES, ['"placemnt"', 'did you mean "placement"?']),
        (ENGINES + 'key = "x"\nnmae = "y"\n', ['"engines[0].nmae"', 'did you mean "engines[0].name"?']),
        ("", ["engines: none is configured"]),
        ("[server\n", ["not a TOML file"]),
        ('[placement]\npolicy = "e3"\n' + ENGINES, ["placement.policy", '"e3"', '"e2"']),
        ('[[models]]\nname = "demo"\ntokenizer = "nowhere"\n' + ENGINES, ["nowhere"]),
        ('[[models]]\nname = "demo"\nprofile = "b7"\n' + ENGINES, ["b7", "a6000-mistral-7b"]),
        (None, ["cannot be read"]),
    ],
)
def test_a_wrong_configuration_is_explained(tmp_path: Path, config: str | None, words: list[str]) -> None:
    path = tmp_path / "plait.toml"
    if config is not None:
        path.write_text(config)
    explained(["serve", "--config", str(path)], words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", "b7"], ["b7", "a6000-mistral-7b"]),
        (["--tokenizer", "nowhere"], ["nowhere"]),
        (["--port", "x"], ["--port"]),
        (["--time-scale", "0"], ["--time-scale"]),
    ],
)
def test_a_wrong_option_of_an_engine_is_explained(options: list[str], words: list[str]) -> None:
    explained(["engine", "--port", str(free_port()), *options], words)


def explained(command: list[str], words: list[str]) -> None:
    """The command ends with status 2 and a few lines on stderr that hold these words."""
    ended = subprocess.run([PLAIT, *command], capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert not [word for word in words if word not in ended.stderr], ended.stderr
    assert "Traceback" not in ended.stderr
