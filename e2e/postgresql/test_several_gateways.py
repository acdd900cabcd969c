"""Gateways that share a PostgreSQL look as one gateway to clients, whichever of them gets a request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.postgresql.server import ABSENT, binaries
from e2e.servers import Fleet, Launcher, Server, eventually
from e2e.several_gateways import Gateways

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

CHAT = "/v1/chat/completions"


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[Gateways]:
    with Launcher(tmp_path) as launch:
        engines = [launch.engine(name) for name in ("a", "b")]
        several = launch.gateways(engines)
        Fleet(several, {engine.name: engine for engine in engines}).start()
        yield several


def chat(text: str, **more: object) -> dict[str, object]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


def value(gateway: Server, session: str, variable: str) -> object:
    return gateway.get(f"/v1/variables/{session}/{variable}").json().get("value")


def test_a_session_is_the_same_from_every_gateway(gateways: Gateways) -> None:
    for number in range(6):
        session = gateways.post("/v1/sessions", json={}).json()["id"]
        made = gateways.post(CHAT, json=chat("Write", plait={"session": session, "output": "a"}))
        assert made.status_code == 200, made.text
        used = gateways.post(CHAT, json=chat("Judge {{a}}", plait={"session": session, "inputs": ["a"]}))
        assert used.status_code == 200, used.text
        text = made.json()["choices"][0]["message"]["content"]
        assert {str(value(one, session, "a")) for one in gateways.members} == {text}, number


def test_another_gateway_goes_on_with_the_sessions_of_one_that_was_killed(gateways: Gateways) -> None:
    first, *others = gateways.members
    given = {"session_id": "s", "semantic_var_id": "v", "value": "kept"}
    assert first.post("/v1/variables", json=given).status_code == 200
    first.kill()
    eventually(lambda: all(value(one, "s", "v") == "kept" for one in others), deadline_s=10)
