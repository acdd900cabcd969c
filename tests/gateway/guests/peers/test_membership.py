"""Which of the gateways that share a store has a session, and what they do as others come, stop and die."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest

from plait.backends.errors import PeerUnavailableError
from plait.gateway.admission.shares import Need
from plait.gateway.guests.peers import membership
from plait.gateway.guests.peers.membership import OF_PEER, Membership, SessionMovedError, UnreachableStoreError
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.signatures import PeerKey
from plait.gateway.guests.store import group_commit, jobs
from plait.gateway.guests.store.event_log import Member
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.streams import Change, StoredStream, StreamKey
from tests.gateway.guests.peers.shared_memory import MemoryKeeper, SharedMemory
from tests.waiting import WITHIN_S

KEY = PeerKey("the-key-of-all-gateways")
ONE = StreamKey("session", "t", "one")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "RETRY_S", 0.001)
    monkeypatch.setattr(jobs, "REGULAR_S", 0.001)
    monkeypatch.setattr(membership, "TAKE_OVER_S", 0.001)


class OneGateway:
    """A gateway's membership, and what it was given to restore."""

    def __init__(self, shared: SharedMemory, url: str) -> None:
        self.keeper = MemoryKeeper(shared, url, lambda epoch, own, name: KEY.sign_row(epoch, own, name, time.time()))
        self.log = GroupCommit(self.keeper)
        peers = Peers({url: url}, url, KEY, share=True)
        self.membership = Membership(self.log, self.keeper, peers, kind="session", instead="deleted")
        self.membership.restore = self._restore
        self.restored: list[StoredStream] = []
        self.may_restore = asyncio.Event()
        self.may_restore.set()

    async def owner(self, session: str = "one") -> str | None:
        return await self.membership.elsewhere("t", session)

    def _restore(self, streams: Sequence[StoredStream]) -> Awaitable[object]:
        self.restored += streams
        return self.may_restore.wait()


@asynccontextmanager
async def gateways(count: int = 2) -> AsyncIterator[tuple[SharedMemory, list[OneGateway]]]:
    """So many that know each other."""
    shared = SharedMemory()
    made = [OneGateway(shared, f"http://{number}") for number in range(count)]
    for gateway in made:
        gateway.log.start()
        await gateway.log.streams()
    for gateway in made:
        await gateway.membership.renew()
    yield shared, made
    shared.away = False
    for gateway in made:
        await gateway.log.close()


@contextmanager
def of_peer() -> Iterator[None]:
    token = OF_PEER.set(True)
    yield
    OF_PEER.reset(token)


@asynccontextmanager
async def kept(gateway: OneGateway) -> AsyncIterator[None]:
    """The gateway renews its lease, and takes over what the dead leave."""
    task = asyncio.create_task(gateway.membership.keep())
    yield
    task.cancel()
    gateway.log.jobs.regular = None
    await asyncio.gather(task, return_exceptions=True)


async def until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(WITHIN_S):
        while not holds():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)


async def test_the_first_that_is_asked_has_a_session_and_the_others_remember() -> None:
    async with gateways() as (_, (one, two)):
        assert await one.owner() is None
        assert await two.owner() == "http://0"
        asked = one.keeper.claims, two.keeper.claims
        assert (await one.owner(), await two.owner()) == (None, "http://0")
        assert (one.keeper.claims, two.keeper.claims) == asked


async def test_requests_that_come_together_ask_the_store_together() -> None:
    async with gateways(1) as (_, (one,)):
        assert await asyncio.gather(*(one.owner(f"s{number % 5}") for number in range(20))) == [None] * 20
        assert one.keeper.claims <= 2


async def test_a_session_that_is_nowhere_is_looked_for_and_leaves_nothing() -> None:
    async with gateways(3) as (shared, (one, two, three)):
        for gateway in (one, two):
            assert await gateway.membership.elsewhere("t", "one", may_begin=False) is None
        assert (shared.owners, one.membership.has("t", "one")) == ({}, False)
        together = (two.membership.elsewhere("t", "one", may_begin=begins) for begins in (False, True, False))
        assert await asyncio.gather(*together) == [None] * 3
        assert await one.membership.elsewhere("t", "one", may_begin=False) == "http://1"
        with of_peer(), pytest.raises(SessionMovedError):
            await three.membership.elsewhere("t", "one", may_begin=False)
        two.log.append([Change(ONE, 1.0, b"event")])
        await two.log.committed(ONE)
        shared.give_up(two.keeper.epoch)
        assert await three.membership.elsewhere("t", "one", may_begin=False) is None
        assert [stream.key for stream in three.restored] == [ONE]


async def test_a_name_that_the_store_refuses_fails_alone() -> None:
    async with gateways(1) as (shared, (one,)):
        shared.refused = ["s3", "s11"]
        owners = await asyncio.gather(*(one.owner(f"s{number}") for number in range(20)), return_exceptions=True)
        refused = {f"s{number}" for number, owner in enumerate(owners) if isinstance(owner, UnreachableStoreError)}
        assert refused == set(shared.refused)
        assert one.log.problem is None
        assert one.log.jobs.refused <= 16


async def test_a_gateway_that_is_sent_anothers_session_says_so() -> None:
    async with gateways(3) as (_, (one, two, three)):
        assert await one.owner() is None
        with of_peer(), pytest.raises(SessionMovedError):
            await two.owner()
        with of_peer():
            assert await three.owner("new") is None, "nobody has it"


async def test_a_session_that_is_over_can_be_anybodys() -> None:
    async with gateways() as (_, (one, two)):
        assert await one.owner() is None
        assert await two.owner() == "http://0"
        one.log.append([Change(ONE, 0.0, None)])
        one.membership.has_ended("t", "one")
        await one.log.committed(ONE)
        two.membership.forget("t", "one")
        assert await two.owner() is None
        assert await one.owner() == "http://1"


async def test_a_name_that_is_made_here_can_be_claimed_without_a_request() -> None:
    async with gateways() as (_, (one, two)):
        assert not one.membership.has("t", "one")
        await one.membership.claim("t", "one")
        assert one.membership.has("t", "one")
        assert await two.owner() == "http://0"


async def test_a_new_gateway_is_known_as_soon_as_it_has_a_session() -> None:
    async with gateways(1) as (shared, (one,)):
        new = OneGateway(shared, "http://new")
        new.log.start()
        await new.log.streams()
        assert await new.owner() is None
        assert await one.owner() == "http://new"
        assert one.membership.peers.others == ["http://new"]
        await new.log.close()


async def test_what_a_dead_gateway_leaves_can_be_used_while_the_rest_is_restored() -> None:
    async with gateways(3) as (shared, (one, two, three)):
        one.log.append([Change(ONE, 1.0, b"event")])
        await one.log.committed(ONE)
        shared.stale(one.keeper.epoch)
        await two.membership.renew()
        assert two.membership.peers.others == ["http://2"]
        with pytest.raises(PeerUnavailableError):
            await two.owner()
        shared.give_up(one.keeper.epoch)
        two.may_restore.clear()
        async with kept(two):
            await until(lambda: two.membership.taken_over)
            assert await two.owner() is None
            assert [stream.key for stream in two.restored] == [ONE]
            assert await three.owner() == "http://1"
            two.may_restore.set()


async def test_what_is_no_session_is_found_where_it_is_and_never_claimed() -> None:
    response = StreamKey("response", "t", "r")
    async with gateways() as (shared, (one, two)):
        assert await two.membership.holder(response) is None
        one.log.append([Change(response, 1.0, b"answer")])
        await one.log.committed(response)
        assert await two.membership.holder(response) == "http://0"
        assert await one.membership.holder(response) is None
        shared.give_up(one.keeper.epoch)
        with pytest.raises(PeerUnavailableError):
            await two.membership.holder(response)
        shared.away = True
        with pytest.raises(UnreachableStoreError):
            await two.membership.holder(response)


async def test_who_asks_for_a_session_that_nobody_has_any_more_gets_it() -> None:
    async with gateways() as (shared, (one, two)):
        one.log.append([Change(ONE, 1.0, b"event")])
        await one.log.committed(ONE)
        shared.give_up(one.keeper.epoch)
        assert await two.owner() is None
        assert [stream.key for stream in two.restored] == [ONE]


async def test_a_gateway_that_stops_lets_go_of_its_sessions_and_takes_none() -> None:
    async with gateways() as (_, (one, two)):
        for session in ("one", "busy"):
            assert await one.owner(session) is None
            assert await two.owner(session) == "http://0"
        one.membership.is_leaving = True
        await one.membership.leave(but={("t", "busy")})
        with of_peer(), pytest.raises(SessionMovedError):
            await one.owner()
        two.membership.forget("t", "one")
        assert await two.owner() is None
        assert (await one.owner("busy"), await one.owner("new")) == (None, None)
        assert await two.owner("new") is None, "it was not claimed"


async def test_without_its_store_a_gateway_knows_only_what_it_knew() -> None:
    async with gateways() as (shared, (one, two)):
        assert await one.owner() is None
        assert await two.owner() == "http://0"
        shared.away = True
        with pytest.raises(UnreachableStoreError):
            await one.owner("new")
        assert one.membership.described() == {"peers": {"http://0": "live", "http://1": "live"}, "store": "away"}
        with pytest.raises(UnreachableStoreError):
            await one.owner("new")
        assert (await one.owner(), await two.owner()) == (None, "http://0")
        shared.away = False
        async with kept(one):
            await until(lambda: one.log.problem is None)
        assert await one.owner("new") is None


async def test_nobody_waits_long_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways(1) as (_, (one,)):
        monkeypatch.setattr(membership, "ASK_S", 0.01)
        hangs = threading.Event()
        hanging = asyncio.ensure_future(one.log.run(lambda: hangs.wait(10)))
        with pytest.raises(UnreachableStoreError):
            await one.owner()
        monkeypatch.setattr(membership, "ASK_S", 10.0)
        with pytest.raises(UnreachableStoreError):
            await one.owner("another")
        hangs.set()
        await hanging
        await asyncio.sleep(0.01)
        assert await one.owner("another") is None


async def test_a_gateway_that_was_given_up_has_nothing_until_it_is_back() -> None:
    async with gateways() as (shared, (one, two)):
        assert await one.owner() is None
        lost = asyncio.Event()
        one.log.on_lost = lost.set
        shared.give_up(one.keeper.epoch)
        async with kept(one):
            await lost.wait()
            one.membership.lost()
            assert await two.owner() is None
            one.log.reopen()
            await one.log.streams()
            await two.membership.renew()
            assert await one.owner() == "http://1"


class Using(membership.Fellow):
    """A gateway that uses a session, and needs a part of a limit."""

    def __init__(self, session: str = "", needs: Need | None = None) -> None:
        self._session = session
        self._needs = {} if needs is None else {"calls": needs}

    def is_used(self, _tenant: str, session: str) -> bool:
        return session == self._session

    def needs(self) -> Mapping[str, Need]:
        return self._needs


async def test_names_that_calls_do_not_use_any_more_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateways() as (_, (one, two)):
        assert await one.owner("label") is None
        assert await one.owner("used") is None
        one.membership.fellow = Using("used")
        monkeypatch.setattr(membership, "UNUSED_S", 0.0)
        async with kept(one):
            await until(lambda: ("t", "label") not in one.membership._own)
        await one.log.committed(ONE)
        assert (await two.owner("label"), await two.owner("used")) == (None, "http://0")


async def test_what_is_shared_goes_where_it_is_needed_and_is_divided_without_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SHARE_S", "REGULAR_S", "LEASE_S"):
        monkeypatch.setattr(membership, name, 0.001)
    async with gateways() as (shared, (one, two)), kept(one), kept(two):
        one.membership.fellow = Using(needs=Need(6, 9))
        tasks = [asyncio.create_task(gateway.membership.share()) for gateway in (one, two)]
        await until(lambda: (one.membership.parts, two.membership.parts) == ({"calls": 6}, {}))
        two.membership.fellow = Using(needs=Need(6, 2))
        await until(lambda: (one.membership.parts, two.membership.parts) == ({"calls": 4}, {"calls": 2}))
        shared.away = True
        await until(lambda: one.membership.parts is None)
        shared.away = False
        await until(lambda: one.membership.parts == {"calls": 4})
        for task in tasks:
            task.cancel()


async def test_a_row_that_no_gateway_has_signed_gets_no_session_and_no_part() -> None:
    async with gateways() as (shared, (one, two)):
        shared.owners[ONE] = 99
        shared.members[99] = Member(99, "http://intruder", "1", is_stale=False, signature="")
        await one.membership.renew()
        assert one.membership.peers.urls.keys() == {"http://0", "http://1"}
        assert one.membership.described()["peers"] == {
            "http://0": "live", "http://1": "live", "http://intruder": "not trusted"
        }  # fmt: skip
        with pytest.raises(PeerUnavailableError):
            await one.owner()
        shared.members[two.keeper.epoch] = shared.members[two.keeper.epoch]._replace(url="http://intruder")
        await one.membership.renew()
        assert one.membership.peers.urls.keys() == {"http://0"}


async def test_lookups_do_not_wait_for_the_restoring_of_an_adopted_session() -> None:
    async with gateways() as (shared, (one, two)):
        one.log.append([Change(ONE, 1.0, b"event")])
        await one.log.committed(ONE)
        shared.give_up(one.keeper.epoch)
        two.may_restore.clear()
        assert await asyncio.wait_for(two.owner("one"), WITHIN_S) is None
        assert await asyncio.wait_for(two.owner("new"), WITHIN_S) is None
        two.may_restore.set()
        await asyncio.sleep(0)
