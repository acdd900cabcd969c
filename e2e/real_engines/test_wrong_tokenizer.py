"""A gateway with the wrong tokenizer: the real engine reads what the client has sent, and three places say so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from e2e.real_engines.engine import MODEL, RealEngine
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.server_process import Server, eventually
from plait.backends.protocol.tokenizer_fingerprint import fingerprint
from plait.backends.tokenization.loading import load_tokenizer

TEXT: Final = "The quick brown fox jumps over the lazy dog. " * 12
GREEDY: Final = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
COMPLETION: Final = {"prompt": TEXT, **GREEDY}
CHAT: Final = {"messages": [{"role": "user", "content": TEXT}], **GREEDY}


@dataclass(frozen=True)
class Misled:
    """A gateway whose tokenizer is that of `folder`, and an engine of another one."""

    gateway: Server
    engine: RealEngine
    folder: Path


def reversed_ids(model: Path, folder: Path) -> Path:
    """The model's tokenizer with the ids of its tokens, but for the special ones, the other way round."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = folder / "tokenizer.json"
    files = json.loads(path.read_text(encoding="utf-8"))
    special, vocabulary = len(files["added_tokens"]), files["model"]["vocab"]
    files["model"]["vocab"] = {
        token: number if number < special else len(vocabulary) - 1 - (number - special)
        for token, number in vocabulary.items()
    }
    path.write_text(json.dumps(files), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def misled(fleet: EngineFleet, model: Path, folder: Path) -> Iterator[Misled]:
    """A second gateway, over one of the fleet's engines."""
    engine, wrong = fleet.engines["engine-1"], reversed_ids(model, folder / "wrong-tokenizer")
    gateway = new_gateway("gateway-misled", {"engine-1": engine}, wrong, folder)
    with ExitStack() as stack:
        EngineFleet(gateway, {"engine-1": engine}).start_gateway(stack)
        eventually(lambda: "degraded" in gateway.get("/ready").json())
        yield Misled(gateway, engine, wrong)


def answered(server: Server, path: str, body: Mapping[str, Any]) -> tuple[str, int]:
    """The answer's text, and the prompt's tokens."""
    response = server.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_the_engine_reads_the_clients_text(misled: Misled, path: str, body: Mapping[str, Any]) -> None:
    assert answered(misled.gateway, path, body) == answered(misled.engine, path, body)


def test_it_would_read_another_text_out_of_the_gateways_ids(misled: Misled) -> None:
    """Else the test above shows nothing."""
    ids = load_tokenizer(str(misled.folder)).encode(TEXT)
    text, tokens = answered(misled.engine, "/v1/completions", {**COMPLETION, "prompt": ids})
    own_text, own_tokens = answered(misled.engine, "/v1/completions", COMPLETION)
    assert (text != own_text, tokens) == (True, own_tokens)


def test_the_prompt_of_a_chat_is_the_engines_own(misled: Misled, model: Path) -> None:
    response = misled.gateway.post("/v1/chat/completions", json={**CHAT, misled.engine.prompt_ids_option: True})
    own = load_tokenizer(str(model)).encode_chat(CHAT["messages"])  # type: ignore[arg-type]
    assert list(misled.engine.prompt_ids(response.json())) == own


def test_three_places_say_so(misled: Misled, model: Path) -> None:
    problem = misled.gateway.get("/ready").json()["degraded"]["engine-1"]
    assert "the vocabulary" in problem
    assert misled.gateway.metric("plait_engine_degraded", engine="engine-1") == 1
    assert misled.gateway.metric("plait_engine_reports", engine="engine-1") == 0
    (warning,) = (line for line in misled.gateway.log().splitlines() if "token ids not sent" in line)
    assert str(misled.folder) in warning
    assert str(model) in warning
    assert "set tokenizer" in warning


def test_its_cache_is_estimated(misled: Misled) -> None:
    """A prompt that was sent counts as cached, though the engine's blocks have other names."""
    body = {**COMPLETION, "prompt": "This one is new. " + TEXT * 2}
    cached = [int(misled.gateway.post("/v1/completions", json=body).headers["plait-cached-tokens"]) for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] > 64


def test_the_engines_fingerprint_is_that_of_the_models_files(fleet: EngineFleet, model: Path) -> None:
    ours = fingerprint(load_tokenizer(str(model)))
    for engine in fleet.engines.values():
        reported = engine.cache_state().tokenizer
        assert reported is not None
        assert msgspec.structs.replace(reported, name=ours.name) == ours
        assert reported.name == str(model)


def test_nothing_changes_before_engines_with_the_gateways_tokenizer(fleet: EngineFleet) -> None:
    assert "degraded" not in fleet.gateway.get("/ready").json()
    assert "token ids not sent" not in fleet.gateway.log()
    for name in fleet.engines:
        assert fleet.gateway.metric("plait_engine_reports", engine=name) == 1
