"""A log that gateways share in a real PostgreSQL: leases, epochs as fences, owners, and connections that break."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from string import ascii_letters

import pytest
from psycopg import Connection
from psycopg.rows import TupleRow

from e2e.postgresql.server import ABSENT, binaries, new_database, shared_postgres
from e2e.server_process import eventually
from plait.gateway.admission.shares import Need
from plait.gateway.guests.store import postgres_keeper
from plait.gateway.guests.store.event_log import (
    HeldElsewhereError,
    LeaseLostError,
    RefusedDataError,
    StoreError,
    StoreVersionError,
)
from plait.gateway.guests.store.postgres_keeper import PostgresKeeper
from plait.gateway.streams import Change, StoredStream, StreamKey
from tests.waiting import SLOWNESS

QUICK_S = 0.5 * SLOWNESS
"""A lease that a test can wait for."""

pytestmark = pytest.mark.skipif(binaries() is None, reason=ABSENT)

ONE, TWO, RESPONSE = (
    StreamKey("session", "t", "one"),
    StreamKey("session", "t", "two"),
    StreamKey("response", "t", "one"),
)


@pytest.fixture
def url() -> str:
    return new_database(shared_postgres())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_keeper, "LEASE_S", QUICK_S)


def keeper_of(url: str, name: str = "a", version: int = 1) -> PostgresKeeper:
    return PostgresKeeper(url, f"http://{name}", release="1", version=version, whole="response")


@pytest.fixture
def both(url: str) -> Iterator[tuple[PostgresKeeper, PostgresKeeper]]:
    """Two gateways that have just begun."""
    one, two = keeper_of(url, "a"), keeper_of(url, "b")
    one.open()
    two.open()
    yield one, two
    one.close()
    two.close()


def event(stream: StreamKey, data: str, version: int = 1) -> Change:
    return Change(stream, 1.5, data.encode(), version)


def end(stream: StreamKey) -> Change:
    return Change(stream, 0.0, None)


def texts(streams: list[StoredStream]) -> dict[StreamKey, str]:
    return {key: "".join(bytes(change.data or b"").decode() for change in events) for key, events, _ in streams}


@contextmanager
def breaking_behind_commit(keeper: PostgresKeeper) -> Iterator[None]:
    """The connection breaks after each commit, before that is heard."""
    transaction = keeper._transaction

    @contextmanager
    def breaking() -> Iterator[Connection[TupleRow]]:
        with transaction() as database:
            yield database
        raise StoreError("the connection broke")

    keeper._transaction = breaking  # type: ignore[method-assign]
    yield
    keeper._transaction = transaction  # type: ignore[method-assign]


def lapse(url: str, epoch: int) -> None:
    """Time passes for one gateway, which is stopped."""
    shared_postgres().run(f"UPDATE plait.gateways SET until = now() - interval '1 s' WHERE epoch = {epoch}", url)


def age(url: str, epoch: int) -> None:
    """A gateway has held its lease for long."""
    shared_postgres().run(f"UPDATE plait.gateways SET steady_since = now() - interval '1 h' WHERE epoch = {epoch}", url)


def test_the_first_that_asks_owns_a_stream(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    assert one.claim([ONE], instead="deleted").owners == {ONE: one.epoch}
    assert two.claim([ONE, TWO], instead="deleted").owners == {ONE: one.epoch, TWO: two.epoch}
    two.write([event(ONE, "x"), event(TWO, "y")])
    one.close()
    assert texts(two.take_over()) == {ONE: ""}, "what is another's cannot be written"


def test_a_deleted_session_keeps_its_owner(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    one.write([event(ONE._replace(kind="deleted"), "until then")])
    assert two.claim([ONE], instead="deleted").owners == {ONE: one.epoch}


def test_what_was_written_is_read_by_the_next_owner(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    one.write([end(ONE), event(ONE, "a"), event(TWO, "b"), event(ONE, "c")])
    one.write([event(TWO, "d"), end(ONE), event(ONE, "anew"), event(RESPONSE, "r")])
    one.close()
    taken = two.take_over()
    assert texts(taken) == {ONE: "anew", TWO: "bd", RESPONSE: "r"}
    assert taken[0].events[0] == event(ONE, "anew")
    two.write([end(TWO), event(ONE, "!")])
    two.close()
    one.open()
    assert texts(list(one.read())) == {ONE: "anew!", RESPONSE: "r"}


@pytest.mark.parametrize("name", ["z\0", "z\ud800", "".join(random.Random(7).choices(ascii_letters, k=8_000))])
def test_a_name_that_no_index_takes_fails_its_own_commit_only(url: str, name: str) -> None:
    keeper, bad = keeper_of(url), StreamKey("session", "t", name)
    keeper.open()
    keeper.write([event(ONE, "a")])
    for refused in (
        lambda: keeper.write([event(TWO, "not written"), event(bad, "x")]),
        lambda: keeper.claim([TWO, bad], instead="deleted"),
    ):
        with pytest.raises(RefusedDataError):
            refused()
    keeper.write([end(bad)])
    keeper.write([event(ONE, "b")])
    assert shared_postgres().run("SELECT name FROM plait.streams", url) == "one"
    keeper.release([ONE])
    assert texts(keeper.take_over()) == {ONE: "ab"}
    keeper.close()


def test_who_only_looks_begins_nothing(url: str, both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    assert two.claim([ONE], instead="deleted", begin=False).owners == {}
    assert shared_postgres().run("SELECT name FROM plait.streams", url) == ""
    one.write([event(ONE, "a")])
    assert two.claim([TWO, ONE], instead="deleted", begin=False).owners == {ONE: one.epoch}
    one.close()
    claims = two.claim([ONE], instead="deleted", begin=False)
    assert (claims.owners, texts(list(claims.adopted))) == ({ONE: two.epoch}, {ONE: "a"})


def test_a_stream_is_replaced_by_its_owner_alone(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    one.write([event(ONE, "a"), event(ONE, "b"), event(TWO, "c")])
    assert texts([one.stream(ONE), two.stream(ONE)]) == {ONE: ""}, "the last is the other's, who has not read it"
    assert [change.data for change in one.stream(ONE).events] == [b"a", b"b"]
    one.write([end(ONE), event(ONE, "ab"), event(ONE, "d")])
    two.write([end(ONE), event(ONE, "not its own")])
    one.close()
    assert texts(two.take_over()) == {ONE: "abd", TWO: "c"}


def test_a_stream_that_is_let_go_is_taken_by_the_next_that_asks(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    one.write([event(ONE, "a")])
    one.release([ONE])
    one.write([event(ONE, "too late")])
    claims = two.claim([ONE], instead="deleted")
    assert claims.owners == {ONE: two.epoch}
    assert texts(list(claims.adopted)) == {ONE: "a"}


def test_a_gateway_that_was_given_up_writes_nothing(url: str, both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    one.write([event(ONE, "a")])
    lapse(url, one.epoch)
    assert [member.is_stale for member in two.renew()] == [True, False], "it has not held its own lease for long"
    age(url, two.epoch)
    assert [member.epoch for member in two.renew()] == [two.epoch]
    assert texts(two.take_over()) == {ONE: "a"}
    for late in (lambda: one.write([event(ONE, "b")]), one.renew, lambda: one.claim([TWO], instead="deleted")):
        with pytest.raises(LeaseLostError):
            late()
    assert one.open() > two.epoch
    assert list(one.read()) == []
    one.write([event(ONE, "still another's")])
    two.close()
    assert texts(one.take_over()) == {ONE: "a"}


def test_after_an_outage_nobody_is_given_up_who_lives(url: str, both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    for keeper in both:
        age(url, keeper.epoch)
        lapse(url, keeper.epoch)  # the database was away
    assert [member.epoch for member in two.renew()] == [one.epoch, two.epoch]
    assert [member.is_stale for member in one.renew()] == [False, False]


def test_leases_end_by_the_databases_clock(quick: None, url: str, both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    begun_s = time.monotonic()
    one.renew()
    eventually(lambda: len(two.renew()) == 1)
    assert time.monotonic() - begun_s >= QUICK_S


def test_the_next_process_at_an_address_has_its_streams_at_once(url: str) -> None:
    first = keeper_of(url)
    first.open()
    first.write([event(ONE, "a")])
    second = keeper_of(url)
    second.open()
    assert texts(list(second.read())) == {ONE: "a"}
    with pytest.raises(LeaseLostError):
        first.write([event(ONE, "b")])
    with pytest.raises(HeldElsewhereError, match="another gateway has the advertise_url http://a, too"):
        first.open()
    second.close()
    first.open()
    first.close()


def test_a_release_that_cannot_read_a_stream_leaves_it(url: str) -> None:
    newer, older = keeper_of(url, "new", version=2), keeper_of(url, "old")
    newer.open()
    newer.write([event(ONE, "a", version=2)])
    newer.close()
    older.open()
    assert older.take_over() == []
    assert older.claim([ONE], instead="deleted").owners == {ONE: 0}
    older.close()


def test_a_connection_that_breaks_is_made_again_and_nothing_is_written_twice(url: str) -> None:
    keeper = keeper_of(url)
    keeper.open()
    with breaking_behind_commit(keeper), pytest.raises(StoreError):
        keeper.write([event(ONE, "a")])
    shared_postgres().run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()", url)
    with pytest.raises(StoreError):
        keeper.write([event(ONE, "a")], again=True)
    keeper.write([event(ONE, "a")], again=True)
    keeper.write([event(ONE, "b")])
    keeper.release([ONE])
    assert texts(keeper.take_over()) == {ONE: "ab"}
    keeper.close()


def test_what_follows_a_commit_that_was_not_heard_is_written(url: str) -> None:
    keeper = keeper_of(url)
    keeper.open()
    with breaking_behind_commit(keeper), pytest.raises(StoreError):
        keeper.write([event(ONE, "a")])
    keeper.write([event(TWO, "b")])
    keeper.renew()
    keeper.write([event(ONE, "c")])
    keeper.release([ONE, TWO])
    assert texts(keeper.take_over()) == {ONE: "ac", TWO: "b"}
    keeper.close()


def test_a_gateway_that_stops_within_a_transaction_blocks_the_others_for_two_seconds(
    quick: None, both: tuple[PostgresKeeper, PostgresKeeper]
) -> None:
    one, two = both
    assert one._database is not None
    one._database.execute(postgres_keeper._TRANSACTION)
    one._hold(one._database, 1)
    eventually(lambda: len(two.renew()) == 1)
    with pytest.raises(StoreError):
        one.write([event(ONE, "too late")])
    with pytest.raises(LeaseLostError):
        one.write([event(ONE, "too late")])


def test_whatever_holds_a_lease_signs_the_row(url: str) -> None:
    signed = [""]
    one = PostgresKeeper(url, "http://a", release="1", version=1, sign=lambda epoch, url, _: f"{epoch} {url} {signed}")
    two = keeper_of(url, "b")
    one.open()
    two.open()
    holds = {
        "write": lambda: one.write([event(ONE, "x")]),
        "claim": lambda: one.claim([TWO], instead="deleted"),
        "take over": one.take_over,
        "share": lambda: one.share({"tenant": Need(4, 1)}),
        "renew": one.renew,
    }
    for signed[0], hold in holds.items():
        lapse(url, one.epoch)
        hold()
        row = two.renew()[0]
        assert (row.is_stale, row.signature) == (False, f"{one.epoch} http://a {signed}")
    one.close()
    two.close()


def test_buckets_are_shared_and_empty_by_the_databases_clock(both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    rates, begun_s = (10.0, inf), time.monotonic()
    assert one.draw("t", rates, (1, 50), (80, 50), burst_s=10).granted == [80, 50]
    granted, used = two.draw("t", rates, (1, 0), (80, 0), burst_s=10)
    assert 20 <= granted[0] <= 20 + 10 * (time.monotonic() - begun_s)
    assert used == [pytest.approx(100, abs=1e-6), 0]
    time.sleep(0.3)
    more, _ = one.draw("t", rates, (1, 0), (80, 0), burst_s=10)
    assert 3 <= more[0] <= 20 + 10 * (time.monotonic() - begun_s) - granted[0]
    assert one.draw("t", rates, (50, 0), (50, 0), burst_s=10).granted == [0, 0]
    assert one.draw("other", rates, (1, 0), (1, 0), burst_s=10).granted == [1, 0]


def test_a_later_schema_is_refused(url: str) -> None:
    keeper = keeper_of(url)
    keeper.open()
    keeper.close()
    shared_postgres().run("UPDATE plait.schema SET version = 99", url)
    with pytest.raises(StoreVersionError, match="written by a later version of Plait"):
        keeper.open()
    keeper.close()


def test_a_password_in_the_url_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="PGPASSWORD") as refused:
        keeper_of("postgresql://plait:hunter2@db/plait")
    assert "hunter2" not in str(refused.value)


def test_what_is_shared_is_never_more_than_the_whole(url: str, both: tuple[PostgresKeeper, PostgresKeeper]) -> None:
    one, two = both
    assert one.share({"calls": Need(6, 9)}) == {"calls": 6}
    assert two.share({"calls": Need(6, 9)}) == {"calls": 0}, "the other has all until it asks again"
    assert one.share({"calls": Need(6, 9), "more": Need(5, 0)}) == {"calls": 3, "more": 5}
    assert two.share({"calls": Need(6, 1)}) == {"calls": 1}
    assert one.share({"calls": Need(6, 9)}) == {"calls": 5}
    lapse(url, two.epoch)
    assert one.share({"calls": Need(6, 9)}) == {"calls": 5}, "who has not been given up may still go on"
    two.close()
    assert one.share({"calls": Need(6, 9)}) == {"calls": 6}
    assert one.share({}) == {}
