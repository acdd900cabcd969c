"""Gateways whose PostgreSQL is behind a pooler (PgBouncer), which gives each transaction another session of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest

from e2e.killing import PROGRAMS
from e2e.postgresql import pooler as pooling
from e2e.postgresql.pooler import Pooler
from e2e.postgresql.server import ABSENT, POOLER, binaries, new_database, shared_postgres
from e2e.programs import by_hand, whole
from e2e.sdk import async_client
from e2e.server_process import Server, eventually
from e2e.servers import Fleet, Launcher
from e2e.several_gateways import Gateways
from plait.gateway.guests.store.event_log import StoreError
from plait.gateway.guests.store.postgres_keeper import PostgresKeeper
from plait.gateway.streams import Change, StreamKey

pytestmark = [
    pytest.mark.skipif(binaries() is None, reason=ABSENT),
    pytest.mark.skipif(not POOLER.exists(), reason=pooling.ABSENT),
]

SESSIONS = 20
ONE = StreamKey("session", "t", "one")
TIMEOUTS = ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout")


@pytest.fixture(params=["transaction", "session"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A new database, through a pooler in either mode."""
    postgres = shared_postgres()
    with Pooler(postgres, mode=request.param) as pooler:
        yield pooler.url_of(new_database(postgres))


def keeper_of(url: str, name: str) -> PostgresKeeper:
    return PostgresKeeper(url, f"http://{name}", release="1", version=1)


def test_keepers_take_turns_in_the_sessions_of_a_pooler(url: str) -> None:
    one, two = keeper_of(url, "a"), keeper_of(url, "b")
    one.open()
    two.open()
    for number in range(20):  # psycopg prepares a statement the sixth time
        for keeper in (one, two):
            keeper.write([Change(StreamKey("session", "t", f"{keeper.epoch}"), 1.5, b"%d" % number)])
            assert [member.is_stale for member in keeper.renew()] == [False, False]
            keeper.draw("t", (10.0,), (1,), (1,), burst_s=10)
            with keeper._transaction() as database:
                told = [database.execute(f"SHOW {name}").fetchone() for name in TIMEOUTS]
                assert told == [("2s",), ("2s",), ("10s",)]
    one.close()
    assert [bytes(change.data or b"") for change in two.take_over()[0].events] == [b"%d" % n for n in range(20)]
    two.close()


def test_statements_are_prepared_without_a_pooler_alone(url: str) -> None:
    pooled, direct = keeper_of(url, "a"), keeper_of(new_database(shared_postgres()), "b")
    for keeper in (pooled, direct):
        keeper.open()
        for _ in range(8):
            keeper.renew()
    assert (pooled._database is None or pooled._database.prepare_threshold) is None
    assert direct._database is not None
    assert direct._database.execute("SELECT count(*) > 0 FROM pg_prepared_statements").fetchone() == (True,)
    pooled.close()
    direct.close()


def test_a_pooler_that_ends_each_transaction_with_its_statement_is_named() -> None:
    with Pooler(shared_postgres(), mode="statement") as pooler:
        keeper = keeper_of(pooler.url_of(new_database(shared_postgres())), "a")
        with pytest.raises(StoreError, match="transaction blocks not allowed in statement pooling mode"):
            keeper.open()


def value(gateway: Server, session: str, variable: str = "v") -> object:
    """None as long as the gateway says that the session's own does not answer."""
    told = gateway.get(f"/v1/variables/{session}/{variable}")
    assert told.status_code in {200, 503}, told.text
    return told.json().get("value")


def set_and_read(gateways: Gateways, number: int) -> None:
    given = {"session_id": f"s{number}", "semantic_var_id": "v", "value": f"of {number}"}
    told = gateways.members[number % 2].post("/v1/variables", json=given)
    assert told.status_code == 200, told.text
    assert [value(gateway, f"s{number}") for gateway in gateways.members] == [f"of {number}"] * 2


def is_kept(gateway: Server, session: str, values: Mapping[str, str]) -> None:
    for variable, expected in values.items():
        eventually(lambda variable=variable: value(gateway, session, variable) is not None)  # type: ignore[misc]
        assert value(gateway, session, variable) == expected


async def test_gateways_behind_a_pooler_answer_right_also_when_one_is_killed(launch: Launcher) -> None:
    postgres = shared_postgres()
    with Pooler(postgres) as pooler:
        engines = [launch.engine(name) for name in ("a", "b")]
        database = pooler.url_of(new_database(postgres))
        gateways = launch.gateways(engines, database=database, count=2)
        await asyncio.to_thread(Fleet(gateways, {engine.name: engine for engine in engines}).start)
        one, two = gateways.members

        for number in range(SESSIONS):
            await asyncio.to_thread(set_and_read, gateways, number)
        async with async_client(gateways) as client:
            expected = await by_hand(client, PROGRAMS["team"])
            body = {"calls": list(whole(PROGRAMS["team"])), "gets": dict.fromkeys(expected)}
            for gateway in (one, two):
                told = await asyncio.to_thread(
                    lambda gateway=gateway: gateway.post("/v1/programs", json={**body, "session": gateway.name})  # type: ignore[misc]
                )
                assert told.json()["values"] == expected, told.text
        one.kill()
        kept = {f"s{number}": {"v": f"of {number}"} for number in range(SESSIONS)}
        kept |= {gateway.name: expected for gateway in (one, two)}
        for session, values in kept.items():
            await asyncio.to_thread(is_kept, two, session, values)
        one.start()
        await asyncio.to_thread(one.wait_until_ready)
        for session, values in kept.items():
            await asyncio.to_thread(is_kept, one, session, values)
