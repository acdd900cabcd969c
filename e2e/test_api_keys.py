"""Keys: of clients at the gateway, and of the gateway at an engine that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from e2e.sdk import asking, sync_client
from e2e.servers import Fleet, Launcher

CLIENT_KEYS = ["first-client-key", "second-client-key"]
ENGINE_KEY = "the-engine-key"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A gateway that asks for keys before an engine that asks for another."""
    with Launcher(tmp_path_factory.mktemp("locked")) as launch:
        engine = launch.engine("locked-1", options=["--api-key", ENGINE_KEY])
        entry = {"name": engine.name, "url": engine.url, "api_key": ENGINE_KEY}
        gateway = launch.gateway([entry], server={"api_keys": CLIENT_KEYS})
        fleet = Fleet(gateway, {engine.name: engine})
        fleet.start()
        yield fleet


@pytest.mark.parametrize("key", CLIENT_KEYS)
def test_every_key_opens_the_gateway(locked: Fleet, key: str) -> None:
    with sync_client(locked.gateway, api_key=key) as client:
        assert client.chat.completions.create(**asking("Hello.")).choices
        assert [model.id for model in client.models.list()] == ["demo"]


def test_the_engines_key_opens_the_engine(locked: Fleet) -> None:
    with sync_client(locked.engines["locked-1"], api_key=ENGINE_KEY) as client:
        assert client.chat.completions.create(**asking("Hello.")).choices


@pytest.mark.parametrize(
    ("at", "key"),
    [("gateway", "wrong"), ("gateway", ENGINE_KEY), ("gateway", "first-client-ke"), ("engine", CLIENT_KEYS[0])],
)
def test_a_wrong_key_is_refused(locked: Fleet, at: str, key: str) -> None:
    with sync_client(locked.gateway if at == "gateway" else locked.engines["locked-1"], api_key=key) as client:
        for ask in (lambda: client.chat.completions.create(**asking("Hello.")), client.models.list):
            with pytest.raises(openai.AuthenticationError) as caught:
                ask()
            assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("authorization", [None, "", "Basic Zmlyc3Q=", f"Basic {CLIENT_KEYS[0]}", CLIENT_KEYS[0]])
def test_a_key_that_is_no_bearer_token_is_refused(locked: Fleet, authorization: str | None) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    for response in (
        locked.gateway.get("/v1/models", headers=headers),
        locked.gateway.get("/v1/models/demo", headers=headers),
        locked.gateway.post("/v1/completions", headers=headers, content=b"{}"),
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")


def test_cache_state_needs_the_engines_key(locked: Fleet) -> None:
    engine = locked.engines["locked-1"]
    assert engine.get("/cache_state").status_code == 401
    assert engine.get("/cache_state", headers={"authorization": f"Bearer {ENGINE_KEY}"}).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_operations_are_open(locked: Fleet, path: str) -> None:
    assert locked.gateway.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_operations_of_the_engine_are_open(locked: Fleet, path: str) -> None:
    assert locked.engines["locked-1"].get(path).status_code == 200


def test_no_key_is_logged(locked: Fleet) -> None:
    logged = locked.gateway.log() + locked.engines["locked-1"].log()
    assert not [key for key in (*CLIENT_KEYS, ENGINE_KEY) if key in logged]
