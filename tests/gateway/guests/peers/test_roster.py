"""Which rows of the store are gateways' rows, and what is said of others."""

from __future__ import annotations

import pytest

from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.roster import MISSED_S, Roster
from plait.gateway.guests.peers.signatures import LIFE_S, PeerKey
from plait.gateway.guests.store.event_log import Member

KEY = PeerKey("the-key-of-all-gateways")
NOW_S = 1_900_000_000.0


def row(epoch: int, url: str, signature: str | None = None, *, is_stale: bool = False, at_s: float = NOW_S) -> Member:
    made = KEY.sign_row(epoch, url, "1", at_s) if signature is None else signature
    return Member(epoch, url, "1", is_stale, made)


def roster() -> Roster:
    return Roster(Peers({"http://a": "http://a"}, "http://a", KEY, share=True))


def test_only_signed_rows_are_of_gateways() -> None:
    made = roster()
    moved = row(3, "http://c")._replace(url="http://intruder")
    rows = [row(1, "http://a"), row(2, "http://b", is_stale=True), moved, row(4, "http://old", "")]
    made.read(rows, NOW_S)
    assert [member.epoch for member in made.members] == [1, 2]
    assert made.described() == {
        "http://a": "live", "http://b": "stale", "http://intruder": "not trusted", "http://old": "not trusted"
    }  # fmt: skip


def test_a_stranger_does_not_hide_the_gateway_at_its_address() -> None:
    made = roster()
    made.read([row(1, "http://a"), row(2, "http://b"), row(3, "http://b", "forged")], NOW_S)
    assert made.described() == {"http://a": "live", "http://b": "live"}


@pytest.mark.parametrize("at_s", [NOW_S - LIFE_S - 1, NOW_S + LIFE_S + 1])
def test_a_row_that_was_signed_at_another_time_is_stale(at_s: float) -> None:
    made = roster()
    made.read([row(1, "http://a"), row(2, "http://b", at_s=at_s)], NOW_S)
    assert made.described() == {"http://a": "live", "http://b": "stale"}
    made.read([row(3, "http://c", at_s=at_s, is_stale=True)], NOW_S)
    assert made.described() == {"http://c": "stale"}


def test_each_row_that_is_sent_nothing_says_why() -> None:
    made = roster()
    rows = [
        row(1, "http://a"),
        row(2, "http://behind", at_s=NOW_S - 120),
        row(3, "http://ahead", at_s=NOW_S + 90),
        row(4, "http://late", is_stale=True),
        row(5, "http://other", "forged"),
        row(6, "http://back", is_stale=True, at_s=NOW_S - 300),
        row(7, "http://back"),
        row(8, "http://a", "forged"),
    ]
    made.read(rows, NOW_S)
    codes = {url: code for url, (code, _) in made.odd.items()}
    assert codes == {
        "http://behind": "clocks_differ", "http://ahead": "clocks_differ", "http://late": "peer_stale",
        "http://other": "peer_not_trusted", "http://a": "peer_not_trusted",
    }  # fmt: skip
    assert "is 120 s behind this one's" in made.odd["http://behind"][1]
    assert "is 90 s ahead of this one's" in made.odd["http://ahead"][1]
    made.read([row(1, "http://a")], NOW_S)
    assert made.odd == {}


def test_a_gateway_that_has_died_is_missed_until_it_is_back_and_one_that_ended_is_not() -> None:
    made = roster()
    for second in range(10):  # b renews its row until it ends, c dies after two seconds
        now_s = NOW_S + second
        rows = [row(1, "http://a", at_s=now_s), row(3, "http://c", at_s=min(now_s, NOW_S + 2))]
        rows += [row(2, "http://b", at_s=now_s)] if second < 5 else []
        made.read(rows[:1] + rows[2:] if second >= 7 else rows, now_s)
    assert made.missed == {"http://c": NOW_S + 7}
    made.read([row(1, "http://a"), row(4, "http://c")], NOW_S + 60)
    assert not made.missed


def test_a_gateway_is_missed_for_ten_minutes_and_not_by_one_that_was_late_itself() -> None:
    made = roster()
    for now_s in (NOW_S, NOW_S + 4, NOW_S + 5, NOW_S + 5 + MISSED_S - 1, NOW_S + 5 + MISSED_S):
        made.read([row(2, "http://b")] if now_s < NOW_S + 5 else [], now_s)
        assert bool(made.missed) == (NOW_S + 5 <= now_s < NOW_S + 5 + MISSED_S)
    made.read([row(3, "http://c")], NOW_S)
    made.read([], NOW_S + 30)
    assert not made.missed
