"""A store that an earlier version has written: what its clients were told is there, and what it had begun goes on.

Each of `versions/` is of a gateway that was killed while a response ran in the background. A call of the session
`story` had set `town`, a program had set `view`, and a step of the program and a submitted call waited for `taste`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.sdk import sync_client
from e2e.server_process import eventually
from e2e.servers import Launcher
from tests.waiting import WITHIN_S

VERSIONS = Path(__file__).parent / "versions"
TTL_S = 3e8
TOWN = {
    "model": "demo", "messages": [{"role": "user", "content": "Name a town."}], "max_tokens": 8, "seed": 1,
    "plait": {"session": "story", "output": "town"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Written:
    """What clients had been told: the call's id, the view, and the responses, the last of which still ran.

    Where a call with headers waited, too, it is `judged`.
    """

    call: str
    view: str
    stored: str
    ended: str
    running: str
    judged: bool = False


WRITTEN = {
    "0.2.0": Written(
        "chatcmpl-2d66701a29d53c17d66d7f0be43363ac",
        "This is emulated text. A slow",
        "resp_d4a31eb91538452583008e4be7ea9788",
        "resp_8632c1cf02664ea4a786329c6082738a",
        "resp_2218b7f74b1e4b9583d02532eebbe401",
    ),
    "fe1fc31e": Written(
        "chatcmpl-7bcbfa379891f697629ce665c54e15c5",
        "This is emulated text. One good",
        "resp_cb5f1c40e9f34213ad27d936e2192b56",
        "resp_c10463017c0140f7bd411f1455091a3c",
        "resp_f8a525e814ac45f08adf7fabf25ca77c",
        judged=True,
    ),
}
"""By version, or by the commit before the steps of programs became one kind."""


@pytest.mark.parametrize("version", WRITTEN)
def test_a_store_is_opened(launch: Launcher, tmp_path: Path, version: str) -> None:
    written = WRITTEN[version]
    store, engine = tmp_path / "store" / "sessions.db", launch.engine("a")
    store.parent.mkdir(mode=0o700)
    shutil.copyfile(VERSIONS / f"{version}.db", store)
    store.chmod(0o600)
    gateway = launch.gateway([engine], store={"path": str(store)}, sessions={"ttl_s": TTL_S})
    for server in (engine, gateway):
        server.start()
        server.wait_until_ready()
    with httpx.Client(base_url=gateway.url, timeout=WITHIN_S) as client:

        def value_of(name: str) -> str:
            wanted = {"session_id": "story", "semantic_var_id": name, "criteria": "latency"}
            value: str = client.post("/v1/get", json=wanted).raise_for_status().json()["value"]
            return value

        eventually(lambda: client.get("/v1/sessions/story").status_code == 200)  # 503 until the store is read
        assert value_of("town") == "This is emulated text. The new"
        assert value_of("view") == written.view
        repeated = client.post("/v1/chat/completions", json=TOWN, headers={"Idempotency-Key": "town-1"})
        assert repeated.json()["id"] == written.call, "it is not answered anew"
        taste = {"session_id": "story", "semantic_var_id": "taste", "value": "salt"}
        client.post("/v1/variables", json=taste).raise_for_status()
        assert all(map(value_of, ("verdict", "song", *(("judged",) if written.judged else ()))))
    with sync_client(gateway) as sdk:
        ended = sdk.responses.retrieve(written.ended)
        assert (ended.status, ended.background, bool(ended.output_text)) == ("incomplete", True, True)
        following: Any = sdk.responses.create(
            model="demo", input="Which number?", previous_response_id=written.stored, max_output_tokens=8
        )
        assert following.previous_response_id == written.stored
        eventually(lambda: sdk.responses.retrieve(written.running).status in {"completed", "incomplete"})
