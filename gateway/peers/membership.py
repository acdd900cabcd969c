"""One gateway among those that share a store: its lease, who the others are, and which of them has a session.

A session is the gateway's that is the first to be asked to make it. The store decides, so all find the same one. Each
gateway remembers what the store said. A gateway that is asked for another's session by a third one says so
(`SessionMovedError`), and that one asks the store again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from math import inf
from typing import Final, TypeVar

import structlog

from plait.backends.errors import GatewayStoppingError, PeerUnavailableError, PlaitError
from plait.gateway.peers.peers import Peers
from plait.gateway.peers.roster import Roster
from plait.gateway.store.event_log import (
    LEASE_S,
    Change,
    Drawn,
    Member,
    Need,
    RefusedDataError,
    SharedKeeper,
    StoredStream,
    StoreError,
    StreamKey,
)
from plait.gateway.store.group_commit import GroupCommit
from plait.gateway.store.jobs import REGULAR_S
from plait.gateway.timer import loop_time_s

TAKE_OVER_S: Final = 1.0
"""Between two looks for sessions that nobody has."""

ASK_S: Final = 3.0
"""So long a request waits for the store to say who has its session. It takes some milliseconds."""

DRAW_S: Final = 1.0
"""Nobody waits longer for a part of what gateways share: then it is divided among them."""

SHARE_S: Final = 0.1
"""Who needs more of what gateways share asks for it so soon; others tell what they need once a second."""

UNUSED_S: Final = 600.0
"""A name that calls share, without variables, is given up after so long without a call."""

REMEMBERED: Final = 100_000
"""Others' sessions whose owner is remembered: some 20 MB."""

OF_PEER: Final = ContextVar("OF_PEER", default=False)
"""Whether another gateway has sent the request that this task answers."""

Name = tuple[str, str]
"""A session's tenant and name."""

Waiters = dict[Name, asyncio.Future[int | None]]
"""The futures of those who wait for the epoch of a session's owner."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class SessionMovedError(PlaitError, status=421, code="session_moved", quotes=False):
    """Another gateway has the session. Only gateways are told so."""

    def __init__(self) -> None:
        super().__init__("Another gateway has this session.")


class GivenUpError(GatewayStoppingError, code="gateway_given_up"):
    """The others have given this gateway up, and what it did since is not stored."""

    def __init__(self) -> None:
        super().__init__("Another gateway has taken this session over. Send the request again.")


class UnreachableStoreError(PlaitError, status=503, code="store_failed", quotes=False):
    """Who has a session, or whether something is stored, cannot be told now."""

    def __init__(self) -> None:
        super().__init__("The store of sessions cannot be reached now. Send the request again.", retry_after_s=1.0)


class Membership:
    """One gateway's. `kind` is that of sessions' streams, `instead` that of what stands for one that was deleted.

    `restore` is given the streams that it takes over, `is_used` says whether it needs a session, and `on_members` is
    called when gateways have come or gone. `needs` says what this gateway needs of what they share, and `on_parts` is
    called when its `parts` of it have changed.
    """

    def __init__(
        self, group_commit: GroupCommit, keeper: SharedKeeper, peers: Peers, *, kind: str, instead: str
    ) -> None:
        self.roster = Roster(peers)
        """All gateways, as the store has them."""
        self.taken_over = 0
        """Sessions that another gateway had before."""
        self.is_leaving = False
        """Whether this gateway takes no more sessions."""
        self.restore: Callable[[Sequence[StoredStream]], Awaitable[None]]
        self.is_used: Callable[[str, str], bool] = lambda _tenant, _session: False
        self.on_members: Callable[[], None] = lambda: None
        self.parts: Mapping[str, int] | None = None
        """What this gateway may use of what it needs, by name; None if the store has not said so lately."""
        self.needs: Callable[[], Mapping[str, Need]] = dict
        self.on_parts: Callable[[], None] = lambda: None
        self._log = group_commit
        self._kind = kind
        self._instead = instead
        self._keeper = keeper
        self.peers = peers
        self._urls: dict[int, str] = {}  # of the others that live, by epoch
        self._own: dict[Name, float] = {}  # when each was asked for last
        self._others: OrderedDict[Name, int] = OrderedDict()
        self._asked: dict[bool, Waiters] = {True: {}, False: {}}  # by whether a session that is not there begins
        self._asking: asyncio.Task[None] | None = None
        self._asks_again_s = 0.0
        self._coming: dict[Name, asyncio.Event] = {}

    def described(self) -> dict[str, object]:
        """The gateways by address, as `/ready` shows them."""
        return {"peers": self.roster.described(), "store": self._log.problem or "ok"}

    # Who has a session.

    async def elsewhere(self, tenant: str, session: str, *, may_begin: bool = True) -> str | None:
        """The gateway that has a session, if that is another one.

        A session that nobody has any more is this one's from now on. So is one that never was, if it `may_begin`;
        else the store keeps nothing of the question.
        Raises `UnreachableStoreError`, `PeerUnavailableError` for an owner that has died, and `SessionMovedError`.
        """
        name = tenant, session
        if name in self._own:
            self._own[name] = loop_time_s()
            await self._whole(name)
            return None
        is_of_peer = OF_PEER.get()
        if self.is_leaving and not is_of_peer:
            return None
        url = None if is_of_peer else self._urls.get(self._others.get(name, 0))
        if url is not None:
            return url
        owner = 0 if self.is_leaving else await self._owner(name, begin=may_begin)
        if owner is None:
            return None
        if owner == self._keeper.epoch:
            await self._whole(name)
            return None
        if is_of_peer:
            raise SessionMovedError
        url = await self._url_of(owner)
        self._others[name] = owner
        if len(self._others) > REMEMBERED:
            self._others.popitem(last=False)
        return url

    async def holder(self, stream: StreamKey) -> str | None:
        """The other gateway that has a stream, which is no session; None if none has.

        Raises `UnreachableStoreError`, and `PeerUnavailableError` while nobody has it.
        """
        try:
            async with asyncio.timeout(ASK_S):
                owner = await self._log.run(partial(self._keeper.owner, stream))
        except (TimeoutError, StoreError):
            raise UnreachableStoreError from None
        return None if owner in {None, self._keeper.epoch} else await self._url_of(owner or 0)

    def has(self, tenant: str, session: str) -> bool:
        """Whether a session is this gateway's, and the store knows it."""
        return (tenant, session) in self._own

    async def claim(self, tenant: str, session: str) -> None:
        """Let the store know that a session is made here. Raises `UnreachableStoreError`."""
        await self._owner((tenant, session), begin=True)

    def owns(self, tenant: str, session: str) -> None:
        """A session is made here whose name nobody else can know."""
        self._own[tenant, session] = loop_time_s()

    def has_ended(self, tenant: str, session: str) -> None:
        self._own.pop((tenant, session), None)

    def forget(self, tenant: str, session: str) -> None:
        self._others.pop((tenant, session), None)

    async def _whole(self, name: Name) -> None:
        """Wait until a session that was taken over is there."""
        if name in self._coming:
            await self._coming[name].wait()

    async def _owner(self, name: Name, *, begin: bool) -> int | None:
        """The epoch of a session's owner, by the store; None if there is no such session, unless it is to `begin`."""
        if self._log.problem is not None or loop_time_s() < self._asks_again_s:
            raise UnreachableStoreError
        waiter = self._asked[begin].get(name)
        if waiter is None:
            waiter = self._asked[begin][name] = asyncio.get_running_loop().create_future()
            if self._asking is None:
                self._asking = asyncio.create_task(self._ask(), name="store-claims")
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.shield(waiter)
        except StoreError:
            raise UnreachableStoreError from None
        except TimeoutError:  # who comes next does not wait for it
            self._asks_again_s = loop_time_s() + ASK_S
            raise UnreachableStoreError from None

    async def _url_of(self, epoch: int) -> str:
        """Where a gateway is reached. Raises `PeerUnavailableError` for one that has died."""
        if epoch not in self._urls:  # it may be new
            try:
                async with asyncio.timeout(ASK_S):
                    await self.renew()
            except (TimeoutError, StoreError):
                raise UnreachableStoreError from None
        if epoch not in self._urls:
            raise PeerUnavailableError("The gateway that had this has ended. Try again.", retry_after_s=1.0)
        return self._urls[epoch]

    async def _ask(self) -> None:
        """Ask the store for all that requests wait for, in as few transactions as it takes."""
        try:
            while any(self._asked.values()):
                for begin, asked in self._asked.items():
                    if asked:
                        self._asked[begin] = {}
                        await self._ask_for(asked, begin=begin)
        finally:
            self._asking = None

    async def _ask_for(self, asked: Waiters, *, begin: bool) -> None:
        keys = [StreamKey(self._kind, *name) for name in asked]
        try:
            claims = await self._log.run(partial(self._keeper.claim, keys, instead=self._instead, begin=begin))
        except RefusedDataError as error:
            await self._ask_for_halves(asked, error, begin=begin)
            return
        except StoreError as error:
            _fail(asked, error)
            return
        nobody, now_s = 0 if begin else None, loop_time_s()
        owners = {name: claims.owners.get(key, nobody) for name, key in zip(asked, keys, strict=True)}
        self._own.update({name: now_s for name, owner in owners.items() if owner == self._keeper.epoch})
        await self.take(claims.adopted)
        for name, waiter in asked.items():
            waiter.set_result(owners[name])

    async def _ask_for_halves(self, asked: Waiters, error: RefusedDataError, *, begin: bool) -> None:
        """The store refuses one of these names: ask until that one is alone, so that it fails alone."""
        if len(asked) == 1:
            _fail(asked, error)
            return
        names = list(asked)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            await self._ask_for({name: asked[name] for name in half}, begin=begin)

    # The lease.

    async def keep(self) -> None:
        """Hold the lease, and take over what gateways leave that have died, for ever.

        The store's thread renews the lease: the event loop may be busy for longer than it lasts.
        """
        swept_s, loop = loop_time_s(), asyncio.get_running_loop()

        def renew() -> None:
            loop.call_soon_threadsafe(self._renewed, self._keeper.renew())

        self._log.jobs.regular = renew
        while True:
            try:
                while not self.is_leaving and (streams := await self._log.run(self._keeper.take_over)):
                    await self.take(streams)
            except StoreError as error:
                log.debug("nothing can be taken over", problem=str(error))
            if loop_time_s() - swept_s > UNUSED_S / 10:
                swept_s = loop_time_s()
                self._sweep(swept_s)
            await asyncio.sleep(TAKE_OVER_S)

    async def renew(self) -> None:
        """Renew the lease now, and learn who the others are."""
        self._renewed(await self._log.run(self._keeper.renew))

    def _renewed(self, rows: Sequence[Member]) -> None:
        self.roster.read(rows, time.time())
        live = {member.epoch: member.url for member in self.roster.members if not member.is_stale}
        live[self._keeper.epoch] = self.peers.own
        self._urls = {epoch: url for epoch, url in live.items() if url != self.peers.own}
        urls = {url: url for url in sorted(live.values())}
        if urls != self.peers.urls:
            log.info("gateways", own=self.peers.own, others=[url for url in urls if url != self.peers.own])
            self.peers.urls = urls
            self.on_members()

    async def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn:
        """Take from a bucket that all gateways share. Raises `StoreError`."""
        return await self._soon(partial(self._keeper.draw, bucket, rates, least, most, burst_s=burst_s))

    async def share(self) -> None:
        """Tell the store what this gateway needs of what all share, for ever. While it is away, all is divided."""
        told, told_s, heard_s = dict[str, Need](), -inf, -inf
        while True:
            await asyncio.sleep(SHARE_S)
            needs, now_s = dict(self.needs()), loop_time_s()
            if not _grows(told, needs, self.parts or {}) and now_s - told_s < REGULAR_S:
                continue
            told, told_s = needs, now_s
            try:
                self.parts = await self._soon(partial(self._keeper.share, needs))
                heard_s = now_s
            except StoreError:
                self.parts = self.parts if now_s - heard_s < LEASE_S else None
            self.on_parts()

    async def _soon(self, work: Callable[[], T]) -> T:
        """Have the store's thread do it. Raises `StoreError` if that takes long, too."""
        if self._log.problem is not None:
            raise StoreError(self._log.problem)
        try:
            async with asyncio.timeout(DRAW_S):
                return await self._log.run(work)
        except TimeoutError as error:
            raise StoreError("the store takes its time") from error

    async def leave(self, *, but: Container[Name]) -> None:
        """Let other gateways have all sessions `but` these, once all that was appended is written."""
        names = [name for name in self._own if name not in but]
        for name in names:
            del self._own[name]
        if names:
            keys = [StreamKey(kind, *name) for kind in (self._kind, self._instead) for name in names]
            await self._log.run(partial(self._keeper.release, keys))

    def lost(self) -> None:
        """The others have given this gateway up: nothing is its own any more."""
        self.parts = None
        self._own.clear()
        self._others.clear()

    async def take(self, streams: Sequence[StoredStream]) -> None:
        """Streams are this gateway's now: restore them. Requests for them wait until that is done."""
        names = {(key.tenant, key.name) for key, *_ in streams if key.kind in {self._kind, self._instead}}
        self.taken_over += len(names)
        whole, now_s = asyncio.Event(), loop_time_s()
        self._own.update(dict.fromkeys(names, now_s))
        self._coming.update(dict.fromkeys(names, whole))
        try:
            if streams:
                await self.restore(streams)
        finally:
            whole.set()
            for name in names:
                self._coming.pop(name, None)

    def _sweep(self, now_s: float) -> None:
        """Give up names that calls do not use any more."""
        unused = [name for name, used_s in self._own.items() if now_s - used_s > UNUSED_S and not self.is_used(*name)]
        for name in unused:
            del self._own[name]
        if unused:
            self._log.append([Change(StreamKey(self._kind, *name), 0.0, None) for name in unused])


def _fail(asked: Waiters, error: StoreError) -> None:
    for waiter in asked.values():
        waiter.set_exception(error)
        waiter.exception()  # whoever asked may have gone


def _grows(told: Mapping[str, Need], needs: Mapping[str, Need], parts: Mapping[str, int]) -> bool:
    """Whether more is needed than was told, and than there is."""
    return any(
        need.wanted > max(parts.get(name, 0), told[name].wanted if name in told else 0) for name, need in needs.items()
    )
