"""Which of several gateways has a session."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from plait.gateway.asgi import id_of
from plait.gateway.peers.forwarding import Forwarding
from plait.gateway.peers.membership import OF_PEER
from plait.gateway.peers.peers import ALONE, PEER_HEADER, Peers
from plait.gateway.peers.session_routes import PeerFront

URLS = {str(number): f"http://127.0.0.1:{9_000 + number}" for number in range(4)}
SESSIONS = [("tenant", f"session-{number}") for number in range(2_000)]


def test_all_gateways_find_the_same_owner_and_each_has_its_share() -> None:
    owners = [Peers(URLS, "0", "k").owner(*session) for session in SESSIONS]
    for own in URLS:
        peers = Peers(URLS, own, "k")
        assert [peers.owner(*session) for session in SESSIONS] == owners
        assert sum(peers.is_own(*session) for session in SESSIONS) == owners.count(own)
    assert all(400 < calls < 600 for calls in Counter(owners).values())


def test_one_gateway_more_takes_only_what_it_gets() -> None:
    fewer = Peers(dict(list(URLS.items())[:3]), "0", "k")
    for session in SESSIONS:
        before, after = fewer.owner(*session), Peers(URLS, "0", "k").owner(*session)
        assert after in {before, "3"}


def test_tenants_are_apart() -> None:
    peers = Peers(URLS, "0", "k")
    assert {peers.owner(f"tenant-{number}", "s") for number in range(50)} == URLS.keys()


def test_a_gateway_alone_has_all_sessions_and_believes_no_header() -> None:
    assert ALONE.count == 1
    assert all(ALONE.is_own(*session) for session in SESSIONS)
    assert ALONE.signed_port(b"") is None
    assert ALONE.signed_port(b" 80") is None


@pytest.mark.parametrize(("port", "read"), [(8000, 8000), (None, 0)])
def test_a_signed_header_is_known_by_its_key(port: int | None, read: int) -> None:
    name, value = Peers(URLS, "0", "key").sign(port)
    assert name == PEER_HEADER
    assert Peers(URLS, "1", "key").signed_port(value) == read
    assert Peers(URLS, "1", "other").signed_port(value) is None


async def test_a_request_of_another_gateway_is_known_and_has_one_id() -> None:
    class Ours:
        peers = Peers(URLS, "1", "key")

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append((dict(scope["headers"]), scope["server"], OF_PEER.get(), id_of(scope)))

    seen, header = list[Any](), Peers(URLS, "0", "key").sign(8000)
    scope: dict[str, Any] = {"type": "http", "headers": [header, (b"a", b"b")], "server": ("host", 1)}
    await PeerFront(app, cast("Forwarding", Ours()))(scope, cast("Any", None), cast("Any", None))
    assert seen == [({b"a": b"b"}, ("host", 8000), True, id_of(scope))]
    assert not OF_PEER.get()
