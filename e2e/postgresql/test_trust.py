"""Who writes to the database that gateways share, or listens between them, gets no key; an address has one gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from e2e.eavesdropper import Eavesdropper
from e2e.postgresql.server import ABSENT, binaries, new_database, shared_postgres
from e2e.server_process import STARTED, Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.several_gateways import PEER_KEY, SECRET

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

KEY, ADMIN_KEY = "the-key-of-a-tenant-which-nobody-else-gets", "the-key-of-the-admin-which-nobody-else-gets"
SECRETS = (KEY.encode(), ADMIN_KEY.encode(), PEER_KEY.encode())
ENTER = """
    INSERT INTO plait.gateways (epoch, url, release, until, steady_since, commits)
    VALUES (nextval('plait.epochs'), '{url}', '1', now() + interval '1 h', now(), 0) RETURNING epoch
"""
"""The row of somebody who can write to the database and has no `peer_key`."""

Start = Callable[..., Server]


@pytest.fixture
def database() -> str:
    return new_database(shared_postgres())


@pytest.fixture
def start(tmp_path: Path, database: str) -> Iterator[Start]:
    """Starts a gateway over one engine; `server` has more of its section."""
    with Launcher(tmp_path) as launch:
        engine = launch.engine("a")

        def new(name: str, **server: object) -> Server:
            common = {"secret": SECRET, "peer_key": PEER_KEY, "admin_key": ADMIN_KEY, "api_keys": [KEY]}
            made = launch.gateway([engine], name, server={**common, **server}, store={"url": database})
            if not engine.running:
                Fleet(made, {"a": engine}).start()
            else:
                made.start()
                made.wait_until_ready()
            return made

        yield new


def asked(gateway: Server, method: str, path: str, key: str = KEY, **more: object) -> httpx.Response:
    return gateway.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)


def set_value(gateway: Server, session: str) -> int:
    body = {"session_id": session, "semantic_var_id": "v", "value": "kept"}
    return asked(gateway, "POST", "/v1/variables", json=body).status_code


def value(gateway: Server, session: str) -> object:
    return asked(gateway, "GET", f"/v1/variables/{session}/v").json().get("value")


def know_each_other(*gateways: Server) -> bool:
    return all(one.metric("plait_peer_up") == len(gateways) for one in gateways)


def intrude(database: str, url: str, session: str) -> None:
    """Write a row for the address, as the owner of a session."""
    epoch = shared_postgres().run(ENTER.format(url=url), database).splitlines()[0]
    shared_postgres().run(f"UPDATE plait.streams SET owner = {epoch} WHERE name = '{session}'", database)


def test_who_writes_a_row_of_a_gateway_is_sent_nothing(start: Start, database: str) -> None:
    one, two = start("one"), start("two")
    eventually(lambda: know_each_other(one, two))
    assert [set_value(one, session) for session in ("kept", "stolen")] == [200, 200]
    with Eavesdropper() as intruder:
        intrude(database, intruder.url, "stolen")
        eventually(lambda: intruder.url in two.get("/ready").json()["peers"])
        refused = asked(two, "GET", "/v1/variables/stolen/v")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_unavailable")
        assert value(two, "kept") == "kept"
        for state in ("draining", "active"):
            changed = asked(two, "POST", "/admin/engines/a", ADMIN_KEY, json={"state": state})
            assert changed.status_code == 200, changed.text
        assert not intruder.heard
        assert two.metric("plait_peers_not_trusted") == 1
        assert two.get("/ready").json()["peers"] == {one.url: "live", two.url: "live", intruder.url: "not trusted"}
        moved = f"UPDATE plait.gateways SET url = '{intruder.url}' WHERE url = '{one.url}'"
        shared_postgres().run(moved, database)
        eventually(lambda: two.metric("plait_peers_not_trusted") == 2)
        assert asked(two, "GET", "/v1/variables/kept/v").status_code == 503, "its owner cannot be told"
        assert not intruder.heard
        eventually(lambda: two.log().count('"code":"peer_not_trusted"') == 1)


def test_who_listens_between_gateways_hears_no_key(start: Start, tmp_path: Path) -> None:
    one = start("one")
    with Eavesdropper(one.port) as listener:
        one.stop()
        config = tmp_path / "one.toml"
        config.write_text(config.read_text().replace(f"http://127.0.0.1:{one.port}", listener.url))
        one.start()
        one.wait_until_ready()
        two = start("two")
        eventually(lambda: know_each_other(one, two))
        assert set_value(one, "s") == 200
        assert value(two, "s") == "kept"
        call = {"model": "demo", "messages": [{"role": "user", "content": "Of {{v}}"}], "max_tokens": 8}
        chat = {**call, "plait": {"session": "s", "inputs": ["v"]}}
        assert asked(two, "POST", "/v1/chat/completions", json=chat).status_code == 200
        assert asked(two, "POST", "/admin/engines/a", ADMIN_KEY, json={"state": "draining"}).status_code == 200
        assert asked(one, "GET", "/admin/engines/a", ADMIN_KEY).json()["state"] == "draining"
        for request in (b"GET /v1/variables/s/v", b"POST /v1/chat/completions", b"POST /admin/engines/a"):
            assert request in listener.heard
        assert not [secret for secret in SECRETS if secret in listener.heard]
        assert b"authorization" not in listener.heard


def test_a_gateway_with_the_address_of_another_ends(start: Start) -> None:
    one = start("one")
    assert set_value(one, "s") == 200
    with pytest.raises(AssertionError, match=f"advertise_url = {one.url}: another gateway answers there"):
        start("two", advertise_url=one.url)
    assert STARTED[-1].wait() == 2
    assert value(one, "s") == "kept"
    one.kill()
    one.start()
    one.wait_until_ready()
    eventually(lambda: value(one, "s") == "kept")
