"""Which of several gateways has a session."""

from __future__ import annotations

from collections import Counter

from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import PeerKey
from plait.gateway.others import Others

KEY = PeerKey("k")
URLS = {str(number): f"http://127.0.0.1:{9_000 + number}" for number in range(4)}
SESSIONS = [("tenant", f"session-{number}") for number in range(2_000)]


def test_all_gateways_find_the_same_owner_and_each_has_its_share() -> None:
    owners = [Peers(URLS, "0", KEY).owner(*session) for session in SESSIONS]
    for own in URLS:
        peers = Peers(URLS, own, KEY)
        assert [peers.owner(*session) for session in SESSIONS] == owners
        assert sum(peers.is_own(*session) for session in SESSIONS) == owners.count(own)
    assert all(400 < calls < 600 for calls in Counter(owners).values())


def test_one_gateway_more_takes_only_what_it_gets() -> None:
    fewer = Peers(dict(list(URLS.items())[:3]), "0", KEY)
    for session in SESSIONS:
        before, after = fewer.owner(*session), Peers(URLS, "0", KEY).owner(*session)
        assert after in {before, "3"}


def test_tenants_are_apart() -> None:
    peers = Peers(URLS, "0", KEY)
    assert {peers.owner(f"tenant-{number}", "s") for number in range(50)} == URLS.keys()


def test_a_gateway_alone_has_all_sessions() -> None:
    assert all(Others().is_own(*session) for session in SESSIONS)
