"""Each route that the engine has, through the gateway: the client gets the very bytes that the engine sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.ports import free_port
from e2e.real_engines.engine import MODEL, EngineKind, RealEngine
from e2e.real_engines.fleet import EngineFleet
from e2e.real_engines.recording_proxy import RecordingProxy
from e2e.servers import Server, eventually, toml

HI: Final = [{"role": "user", "content": "Say hi."}]
USAGE: Final = {"stream": True, "stream_options": {"include_usage": True}}
TEXTS: Final = ["the sky is blue", "grass is green"]

GENERATING: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 8}),
    "chat, streamed": ("/v1/chat/completions", {"messages": HI, "max_tokens": 8, **USAGE}),
    "text": ("/v1/completions", {"prompt": "Say hi.", "max_tokens": 8}),
    "text, streamed": ("/v1/completions", {"prompt": "Say hi.", "max_tokens": 8, **USAGE}),
    "response": ("/v1/responses", {"input": "Say hi.", "max_output_tokens": 8}),
    "response, streamed": ("/v1/responses", {"input": "Say hi.", "max_output_tokens": 8, "stream": True}),
    "message": ("/v1/messages", {"messages": HI, "max_tokens": 8}),
    "message, streamed": ("/v1/messages", {"messages": HI, "max_tokens": 8, "stream": True}),
    "count": ("/v1/messages/count_tokens", {"messages": HI}),
    "tokens of a text": ("/tokenize", {"prompt": "Say hi."}),
    "text of tokens": ("/detokenize", {"tokens": [9, 10, 11]}),
    "a refusal": ("/v1/chat/completions", {"messages": HI, "max_tokens": 0}),
}
EMBEDDING: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "vectors": ("/v1/embeddings", {"input": TEXTS}),
    "vectors in base64": ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}),
    "scores": ("/v1/score", {"text_1": "what is blue?", "text_2": TEXTS}),
    "ranks": ("/v1/rerank", {"query": "what is blue?", "documents": TEXTS}),
    "tokens": ("/tokenize", {"prompt": "Say hi."}),
}


@dataclass(frozen=True)
class Tapped:
    """A gateway over one engine, and what the engine answered."""

    gateway: Server
    proxy: RecordingProxy

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Send a request: the client's status and bytes are the engine's.

        An error that has not OpenAI's shape gets it on the way.
        """
        self.proxy.answers.clear()
        response = self.gateway.post(path, json={"model": MODEL, **body})
        assert response.headers["plait-engine"] == "tapped"
        eventually(lambda: len(self.proxy.answers) == 1)  # the proxy notes an answer once it has sent it
        status, sent = self.proxy.answers[-1]
        assert response.status_code == status
        assert response.content == sent or (status >= 400 and "error" not in json.loads(sent))


def tapped(stack: ExitStack, engine: RealEngine, model: Path, folder: Path, name: str) -> Tapped:
    """A gateway that reaches the engine through a proxy; `stack` stops both."""
    proxy, port = stack.enter_context(RecordingProxy(engine.url)), free_port()
    config = {
        "server": {"port": port},
        "models": [{"name": MODEL, "tokenizer": str(model)}],
        "engines": [{"name": "tapped", "url": proxy.url}],
    }
    path = folder / f"{name}.toml"
    path.write_text(toml(config))
    gateway = Server(name, port, ["serve", "--config", str(path)], folder / f"{name}.log", ready_path="/ready")
    gateway.start()
    stack.callback(gateway.stop)
    gateway.wait_until_ready()
    eventually(lambda: gateway.metric("plait_engine_up") == 1)
    return Tapped(gateway, proxy)


@pytest.fixture(scope="module")
def generating(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Tapped]:
    with ExitStack() as stack:
        yield tapped(stack, fleet.engines["engine-1"], model, folder, "tapped-generating")


@pytest.mark.parametrize("request_", GENERATING)
def test_the_client_gets_what_the_engine_sent(generating: Tapped, request_: str) -> None:
    generating.check(*GENERATING[request_])


def test_what_the_engine_does_not_have_is_not_found(generating: Tapped) -> None:
    response = generating.gateway.post("/v1/load_lora_adapter", json={"model": MODEL})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


@pytest.fixture(scope="module")
def embedding(kind: EngineKind, fleet: EngineFleet, python: Path, model: Path, folder: Path) -> Iterator[Tapped]:
    """The tiny model, served for its vectors. The fleet runs beside it, and rests.

    On vLLM only, whose routes these are: SGLang's scores and ranks take other fields.
    """
    if kind.name != "vllm":
        pytest.skip("vLLM's routes")
    assert fleet.gateway.running
    engine = kind.stock("embedding", python, model, folder)
    engine.add_flags(kind.embedding)
    with ExitStack() as stack:
        engine.start()
        stack.callback(engine.stop)
        engine.wait_until_ready()
        yield tapped(stack, engine, model, folder, "tapped-embedding")


@pytest.mark.parametrize("request_", EMBEDDING)
def test_vectors_and_what_is_made_of_them_pass_too(embedding: Tapped, request_: str) -> None:
    embedding.check(*EMBEDDING[request_])
