"""The probe against a scripted engine on a socket: what it learns, what it sends, and how it words a failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from plait.lab.profiling import engine_probe
from plait.lab.profiling.engine_probe import EngineProbe
from plait.lab.profiling.profile_plan import Limits
from plait.lab.profiling.tier_loads import Loaded

MODELS = {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 8192}, {"id": "other"}]}
STATE = {
    "engine": "host:1",
    "kind": "vllm",
    "block_tokens": 32,
    "kv": {"total_blocks": 100, "free_blocks": 100, "cached_blocks": 0},
    "iteration": {"budget_tokens": 512},
}
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
STREAM = (
    b'data: {"choices":[{"text":"a"}]}\n\ndata: '
    + msgspec.json.encode({"choices": [], "usage": USAGE})
    + b"\n\ndata: [DONE]\n\n"
)

Answer = tuple[int, Any]
Answers = dict[str, Answer | Callable[[], Answer]]


class Engine:
    """Answers each path with a status and a body (JSON unless it is bytes); others with 404."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.requests: list[tuple[str, bytes, Any]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
                body = await reader.readexactly(int(fields.get(b"content-length", 0)))
                path = head.split(b" ")[1].decode()
                self.requests.append((path, head, msgspec.json.decode(body) if body else None))
                answer = self.answers.get(path, (404, {"detail": "Not Found"}))
                status, value = answer() if callable(answer) else answer
                content = value if isinstance(value, bytes) else msgspec.json.encode(value)
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content))
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def probing(answers: Answers, **options: Any) -> AsyncIterator[tuple[EngineProbe, Engine]]:
    engine = Engine(answers)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with EngineProbe(engine.url, **options) as probe:
        yield probe, engine
    server.close()
    await server.wait_closed()


async def test_it_learns_what_the_engine_tells() -> None:
    async with probing({"/v1/models": (200, MODELS), "/cache_state": (200, STATE)}) as (probe, _):
        identity = await probe.identify()
    assert identity.limits == Limits(8192, budget_tokens=512, kv_tokens=3200)
    assert (identity.engine, identity.model) == ("vllm host:1", "m")


async def test_it_learns_what_came_from_each_tier() -> None:
    host = {"tier": "host", "total_blocks": 9, "stored": [], "loaded_tokens": 640, "loading_s": 0.5}
    answers: Answers = {
        "/v1/models": (200, MODELS),
        "/cache_state": (200, {**STATE, "tiers": [host, {"tier": "disk"}]}),
    }
    async with probing(answers) as (probe, _):
        assert await probe.loaded() == {"host": Loaded(640, 0.5), "disk": Loaded(0, 0.0)}
    async with probing({"/cache_state": (200, STATE)}) as (probe, _):
        assert await probe.loaded() == {}


async def test_openais_routes_are_enough() -> None:
    async with probing({"/v1/models": (200, MODELS)}) as (probe, engine):
        identity = await probe.identify()
        await probe.check_idle()
        assert await probe.loaded() == {}
    assert identity.limits == Limits(8192)
    assert identity.engine == f"vllm at {engine.url}"
    assert [path for path, _, _ in engine.requests].count("/cache_state") == 1


async def test_prompts_go_as_token_ids_with_the_key_and_the_model() -> None:
    answers: Answers = {"/v1/models": (200, MODELS), "/v1/completions": (200, STREAM)}
    async with probing(answers, model="other", api_key="k") as (probe, engine):
        await probe.identify()
        streams = await probe.complete([[1, 2, 3], [4, 5, 6]], 1)
    sent = [body for path, _, body in engine.requests if path == "/v1/completions"]
    assert sorted(body["prompt"] for body in sent) == [[1, 2, 3], [4, 5, 6]]
    assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in sent} == {("other", 1, True)}
    assert all(b"authorization: Bearer k" in head for _, head, _ in engine.requests)
    heads = [head for path, head, _ in engine.requests if path == "/v1/completions"]
    assert all(b"x-data-parallel-rank: 0" in head for head in heads), "the rank that /cache_state reports"
    assert [(stream.prompt_tokens, stream.cached_tokens) for stream in streams] == [(3, 0), (3, 0)]
    assert all(0 < stream.ttft_s < 60 for stream in streams)


@pytest.mark.parametrize(
    ("answers", "model", "message"),
    [
        ({}, None, "has no /v1/models: --engine takes the URL without /v1"),
        ({"/v1/models": (200, MODELS)}, "x", "does not serve x; it serves m, other"),
        ({"/v1/models": (200, {"data": []})}, None, "does not serve any model; it serves none"),
        ({"/v1/models": (401, {"error": {"message": "a key, please"}})}, None, "answers 401: a key, please"),
        ({"/v1/models": (200, b"<html>")}, None, "/v1/models is not understood"),
        ({"/v1/models": (200, MODELS), "/cache_state": (200, {})}, None, "/cache_state is not understood"),
    ],
)
async def test_an_engine_that_cannot_be_identified(answers: Answers, model: str | None, message: str) -> None:
    async with probing(answers, model=model) as (probe, _):
        with pytest.raises(ValueError, match=message):
            await probe.identify()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": "no ids"}), "refuses prompts of token ids on /v1/completions with status 400: no ids"),
        ((422, {"message": "text only"}), "refuses prompts of token ids .* text only"),
        ((503, b""), "fails on /v1/completions with status 503: no reason given"),
        ((200, b"{}"), "has no tokens"),
    ],
)
async def test_an_engine_that_will_not_complete(answer: Answer, message: str) -> None:
    async with probing({"/v1/completions": answer}) as (probe, _):
        with pytest.raises(ValueError, match=message):
            await probe.complete([[1, 2], [3, 4]], 1)


async def test_nobody_there() -> None:
    async with probing({}) as (_, engine):
        pass
    async with EngineProbe(engine.url) as probe:
        with pytest.raises(ValueError, match="does not answer"):
            await probe.identify()
        with pytest.raises(ValueError, match="cannot be reached"):
            await probe.complete([[1]], 1)


async def test_other_peoples_calls_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "WINDING_DOWN_S", 0.001)
    busy = {**STATE, "queue": {"running": 2, "waiting": 1}}
    async with probing({"/cache_state": (200, busy)}) as (probe, _):
        with pytest.raises(ValueError, match="busy with 3 calls that are not ours"):
            await probe.check_idle()


async def test_calls_that_are_just_ending_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_probe, "WINDING_DOWN_S", 0.001)
    running = iter([1, 1])
    answers: Answers = {"/cache_state": lambda: (200, {**STATE, "queue": {"running": next(running, 0)}})}
    async with probing(answers) as (probe, engine):
        await probe.check_idle()
    assert len(engine.requests) == 3


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://user:secret@host", "ftp://host"])
def test_a_url_that_names_no_engine(url: str) -> None:
    with pytest.raises(ValueError, match="an engine's URL is"):
        EngineProbe(url)
