"""One gateway among those that share a store: its lease, the other gateways, and the owner of each session.

Each session has one owner, which the store decides: the first gateway that claims the session. A gateway caches the
owners that it has looked up. If it forwards a request by an outdated entry, the receiver refuses (`SessionMovedError`),
and the gateway asks the store again. A dead gateway's streams lose their owner, and the others take them over. Lookups
of many requests go to the store as one batch. The store's thread does all work in the store (`GroupCommit.run`).
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
from plait.gateway.admission.rate_leases import Drawn
from plait.gateway.admission.shares import REGULAR_S, Need
from plait.gateway.guests.peers.peers import Peers
from plait.gateway.guests.peers.roster import Roster
from plait.gateway.guests.store.event_log import LEASE_S, Member, RefusedDataError, SharedKeeper, StoreError
from plait.gateway.guests.store.group_commit import GroupCommit
from plait.gateway.streams import Change, StoredStream, StreamKey
from plait.gateway.timer import loop_time_s

TAKE_OVER_S: Final = 1.0
"""The period in which a gateway looks for streams without an owner."""

ASK_S: Final = 3.0
"""The longest wait for the owner of a session. The store takes some milliseconds."""

DRAW_S: Final = 1.0
"""The longest wait for a shared limit. Without an answer, limits are divided by the number of gateways."""

SHARE_S: Final = 0.1
"""How soon a gateway asks for a larger part of shared limits. Otherwise it reports its needs once a second."""

UNUSED_S: Final = 600.0
"""How long a gateway owns the name of a session without variables after its last call."""

REMEMBERED: Final = 100_000
"""The size of the cache of other sessions' owners: some 20 MB."""

OF_PEER: Final = ContextVar("OF_PEER", default=False)
"""Whether another gateway has forwarded the request that this task answers."""

Name = tuple[str, str]
"""A session's tenant and name."""

Waiters = dict[Name, asyncio.Future[int | None]]
"""By session: the future of its owner's epoch."""

T = TypeVar("T")

log = structlog.get_logger(__name__)


class SessionMovedError(PlaitError, status=421, code="session_moved", quotes=False):
    """Another gateway owns the session. Sent to gateways only, not to clients."""

    def __init__(self) -> None:
        super().__init__("Another gateway has this session.")


class GivenUpError(GatewayStoppingError, code="gateway_given_up"):
    """The lease was lost: other gateways own the sessions, and nothing is stored that this gateway did since."""

    def __init__(self) -> None:
        super().__init__("Another gateway has taken this session over. Send the request again.")


class UnreachableStoreError(PlaitError, status=503, code="store_failed", quotes=False):
    """The store is out of reach, so that the owner of a session, or the end of a commit, is unknown."""

    def __init__(self) -> None:
        super().__init__("The store of sessions cannot be reached now. Send the request again.", retry_after_s=1.0)


class Fellow:
    """A gateway, as its membership sees it: until it is ready, one without calls."""

    def members_changed(self) -> None: ...

    def is_used(self, _tenant: str, _session: str) -> bool:
        """Whether a session is in use."""
        return False

    def needs(self) -> Mapping[str, Need]:
        """The gateway's needs of shared limits, by name."""
        return {}

    def parts_changed(self) -> None: ...


class Membership:
    """The membership of one gateway. `kind` is the kind of sessions' streams, `instead` that of deleted sessions.

    `restore` gets the streams that were taken over, and has each of them found from then on, also before the awaitable
    that it returns has restored all. `fellow` is the gateway.
    """

    def __init__(
        self, group_commit: GroupCommit, keeper: SharedKeeper, peers: Peers, *, kind: str, instead: str
    ) -> None:
        self.roster = Roster(peers)
        """All gateways in the store."""
        self.taken_over = 0
        """The number of sessions taken over from other gateways."""
        self.is_leaving = False
        """Whether this gateway takes no more sessions, because it stops."""
        self.restore: Callable[[Sequence[StoredStream]], Awaitable[object]]
        self.fellow = Fellow()
        self.parts: Mapping[str, int] | None = None
        """This gateway's part of each shared limit, by name; None if the store has been out of reach for long."""
        self._log = group_commit
        self._kind = kind
        self._instead = instead
        self._keeper = keeper
        self.peers = peers
        self._urls: dict[int, str] = {}  # by epoch: the other living gateways
        self._own: dict[Name, float] = {}  # own sessions, with the time of the last request
        self._others: OrderedDict[Name, int] = OrderedDict()  # cache: the epochs of other sessions' owners
        self._asked: dict[bool, Waiters] = {True: {}, False: {}}  # by `begin`: lookups for the next batch
        self._asking: asyncio.Task[None] | None = None
        self._restoring: set[asyncio.Future[object]] = set()
        self._asks_again_s = 0.0  # after a time-out, requests fail at once until then

    def described(self) -> dict[str, object]:
        """The gateways by address, as `/ready` shows them."""
        return {"peers": self.roster.described(), "store": self._log.problem or "ok"}

    # The owners of sessions.

    async def elsewhere(self, tenant: str, session: str, *, may_begin: bool = True) -> str | None:
        """The gateway that owns a session; None: this one does, or nobody.

        This gateway takes over a session without an owner. With `may_begin`, it also claims one that does not exist.
        Raises `UnreachableStoreError`, `PeerUnavailableError` for an owner that has died, and `SessionMovedError`.
        """
        name = tenant, session
        if name in self._own:
            self._own[name] = loop_time_s()
            return None
        is_of_peer = OF_PEER.get()
        if self.is_leaving and not is_of_peer:
            return None
        url = None if is_of_peer else self._urls.get(self._others.get(name, 0))
        if url is not None:
            return url
        owner = 0 if self.is_leaving else await self._owner(name, begin=may_begin)
        if owner is None or owner == self._keeper.epoch:
            return None
        if is_of_peer:
            raise SessionMovedError
        url = await self._url_of(owner)
        self._others[name] = owner
        if len(self._others) > REMEMBERED:
            self._others.popitem(last=False)
        return url

    async def holder(self, stream: StreamKey) -> str | None:
        """The other gateway that owns a stream that is no session; None if none does.

        Raises `UnreachableStoreError`, and `PeerUnavailableError` while the stream has no living owner.
        """
        try:
            async with asyncio.timeout(ASK_S):
                owner = await self._log.run(partial(self._keeper.owner, stream))
        except (TimeoutError, StoreError):
            raise UnreachableStoreError from None
        return None if owner in {None, self._keeper.epoch} else await self._url_of(owner or 0)

    def has(self, tenant: str, session: str) -> bool:
        return (tenant, session) in self._own

    async def claim(self, tenant: str, session: str) -> None:
        """Claim a session in the store. Raises `UnreachableStoreError`."""
        await self._owner((tenant, session), begin=True)

    def owns(self, tenant: str, session: str) -> None:
        """Own a new session without a lookup: `elsewhere` has claimed its id, or the id was generated here."""
        self._own[tenant, session] = loop_time_s()

    def has_ended(self, tenant: str, session: str) -> None:
        self._own.pop((tenant, session), None)

    def forget(self, tenant: str, session: str) -> None:
        self._others.pop((tenant, session), None)

    async def _owner(self, name: Name, *, begin: bool) -> int | None:
        """Look up the epoch of a session's owner; None if the session does not exist and may not `begin`."""
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
        except TimeoutError:  # later requests fail at once for a while
            self._asks_again_s = loop_time_s() + ASK_S
            raise UnreachableStoreError from None

    async def _url_of(self, epoch: int) -> str:
        """The address of a gateway. Raises `PeerUnavailableError` for one that has died."""
        if epoch not in self._urls:  # it may have joined since the last renewal
            try:
                async with asyncio.timeout(ASK_S):
                    await self.renew()
            except (TimeoutError, StoreError):
                raise UnreachableStoreError from None
        if epoch not in self._urls:
            raise PeerUnavailableError("The gateway that had this has ended. Try again.", retry_after_s=1.0)
        return self._urls[epoch]

    async def _ask(self) -> None:
        """A task that does the pending lookups in batches, one transaction for each, until none is left."""
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
        rest = self.take(claims.adopted) if claims.adopted else None
        for name, waiter in asked.items():
            waiter.set_result(owners[name])
        if rest is not None:
            restoring = asyncio.ensure_future(rest)
            self._restoring.add(restoring)
            restoring.add_done_callback(self._restoring.discard)

    async def _ask_for_halves(self, asked: Waiters, error: RefusedDataError, *, begin: bool) -> None:
        """The store refuses one of these names: halve the batch until that name fails alone."""
        if len(asked) == 1:
            _fail(asked, error)
            return
        names = list(asked)
        for half in (names[: len(names) // 2], names[len(names) // 2 :]):
            await self._ask_for({name: asked[name] for name in half}, begin=begin)

    # The lease.

    async def keep(self) -> None:
        """A task that keeps the lease, and takes over the streams of dead gateways.

        The store's thread renews the lease, because the event loop may be busy for longer than a lease.
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
        """Renew the lease now, and read the list of gateways."""
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
            self.fellow.members_changed()

    async def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn | None:
        """Draw from a bucket that all gateways share. None: the store does not answer."""
        try:
            return await self._soon(partial(self._keeper.draw, bucket, rates, least, most, burst_s=burst_s))
        except StoreError:
            return None

    async def share(self) -> None:
        """A task that exchanges needs for parts of shared limits with the store (`SharedKeeper.share`)."""
        told, told_s, heard_s = dict[str, Need](), -inf, -inf
        while True:
            await asyncio.sleep(SHARE_S)
            needs, now_s = dict(self.fellow.needs()), loop_time_s()
            if not _grows(told, needs, self.parts or {}) and now_s - told_s < REGULAR_S:
                continue
            told, told_s = needs, now_s
            try:
                self.parts = await self._soon(partial(self._keeper.share, needs))
                heard_s = now_s
            except StoreError:
                self.parts = self.parts if now_s - heard_s < LEASE_S else None
            self.fellow.parts_changed()

    async def _soon(self, work: Callable[[], T]) -> T:
        """Run `work` in the store's thread. Raises `StoreError`, also after `DRAW_S`."""
        if self._log.problem is not None:
            raise StoreError(self._log.problem)
        try:
            async with asyncio.timeout(DRAW_S):
                return await self._log.run(work)
        except TimeoutError as error:
            raise StoreError("the store takes its time") from error

    async def leave(self, *, but: Container[Name]) -> None:
        """Release all sessions `but` these to other gateways, after all that was appended is written."""
        names = [name for name in self._own if name not in but]
        for name in names:
            del self._own[name]
        if names:
            keys = [StreamKey(kind, *name) for kind in (self._kind, self._instead) for name in names]
            await self._log.run(partial(self._keeper.release, keys))

    def lost(self) -> None:
        """The lease was lost: this gateway owns nothing any more."""
        self.parts = None
        self._own.clear()
        self._others.clear()

    def take(self, streams: Sequence[StoredStream]) -> Awaitable[object]:
        """Own these streams from now on. The awaitable restores them all; no request has to wait for that."""
        names = {(key.tenant, key.name) for key, *_ in streams if key.kind in {self._kind, self._instead}}
        self.taken_over += len(names)
        self._own.update(dict.fromkeys(names, loop_time_s()))
        return self.restore(streams)

    def _sweep(self, now_s: float) -> None:
        """Give up the names of sessions that no call has used for `UNUSED_S`."""
        used = self.fellow.is_used
        unused = [name for name, used_s in self._own.items() if now_s - used_s > UNUSED_S and not used(*name)]
        for name in unused:
            del self._own[name]
        if unused:
            self._log.append([Change(StreamKey(self._kind, *name), 0.0, None) for name in unused])


def _fail(asked: Waiters, error: StoreError) -> None:
    for waiter in asked.values():
        waiter.set_exception(error)
        waiter.exception()  # marks it as retrieved, because the request may have ended


def _grows(told: Mapping[str, Need], needs: Mapping[str, Need], parts: Mapping[str, int]) -> bool:
    """Whether a need exceeds both the part at hand and what the store was asked for."""
    return any(
        need.wanted > max(parts.get(name, 0), told[name].wanted if name in told else 0) for name, need in needs.items()
    )
