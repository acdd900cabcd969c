"""Durable sessions: their events are written to a log, from which the next process rebuilds them (event sourcing).

The life of a gateway with a store:

1. Start (`recover`): wait for the log's lease and read. Requests for sessions get 503 with `Retry-After`, all others
   are served. Then what was read is restored one by one, in slices of the event loop; what is asked for comes first.
2. Run: each session appends its events through its record (`Recorded`). Answers to clients wait for the commit.
3. Stop (`hand_over`): clients that wait are sent away, running calls may end, and the next gateway goes on.

If several gateways share the store, a gateway also restores what it takes over from others (`_restore`),
and ends its own if the others have given it up (`_lose`). No answer goes out before its commit, because another gateway
may own the session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import structlog

from plait.backends.errors import GatewayStoppingError, PlaitError, SessionEndedError
from plait.gateway.fleet.router import Router
from plait.gateway.guests.durability.compaction import Compaction
from plait.gateway.guests.durability.recorded import Claimed, Recorded, decoded
from plait.gateway.guests.durability.replay import AGAIN, Again, Replay
from plait.gateway.guests.peers.membership import GivenUpError, Membership, UnreachableStoreError
from plait.gateway.guests.programs.chained_call import CallRunner, ChainedCall
from plait.gateway.guests.programs.core.record import UNRECORDED, Opened, Records, Refused, SessionEvent, Unrecorded
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.responses.background_call import responding_again
from plait.gateway.guests.responses.stored_responses import ResponseLog, StoredResponses
from plait.gateway.guests.store.event_log import LOST, StoreError, set_aside
from plait.gateway.guests.store.store import Store
from plait.gateway.intake.turns import Pieces
from plait.gateway.streams import DELETED, RESPONSE, SESSION, Change, StoredStream, StreamKey
from plait.gateway.timer import loop_time_s
from plait.policy.programs.request_graph_state import CallState

RETRY_AFTER_S = 1.0
"""The `Retry-After` while the store is read: a second for 10,000 sessions or for 50,000 stored responses."""

RESTORING = "restoring"
"""The account of the event loop's time that restoring takes."""

FLEET_S = 60.0
"""The longest wait of interrupted calls for an engine of their model. An engine's first probes take some seconds."""

POLL_S = 0.05

LEAVE_S = 0.1
"""The period in which a stopping gateway releases the sessions whose calls have ended."""

log = structlog.get_logger(__name__)


class RecoveringError(PlaitError, status=503, code="recovering"):
    """What was stored has not been read from the log yet."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Sessions cannot be used yet: {why}. Try again.", retry_after_s=RETRY_AFTER_S)


class NotStoredError(PlaitError, status=503, code="store_failed"):
    """A new durable session is refused, because the store cannot be written."""

    def __init__(self) -> None:
        super().__init__(
            "No new durable session can be made: the store cannot be written. Try again, or make one in memory with "
            "'plait-durable: false'.",
            retry_after_s=RETRY_AFTER_S,
        )


class Durability(Records, ResponseLog):
    """The records of a gateway with a `store`. `membership` is set if several gateways share it."""

    def __init__(self, store: Store, membership: Membership | None = None) -> None:
        self.log = log = store.log
        self.damage = store.damage
        self._compaction = Compaction(log, store.keeper)
        self.membership = membership
        if membership is not None:
            membership.restore = self._restore
            log.on_lost = self._lose
        self._offset_s = 0.0
        self._why: str | None = "the store is being read"
        self._is_frozen = False
        self._together: list[Change] | None = None
        self._restart: asyncio.Future[None] | None = None
        self._leaving: asyncio.Future[None] | None = None
        self._parts: tuple[CallRunner, StoredResponses, Router] | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._left: dict[tuple[str, str], list[Callable[[], None]]] = {}  # by tenant and name: restore what was read
        self.is_over = False
        """Whether the sessions were handed over to the next gateway."""

    @property
    def problem(self) -> str | None:
        return self.log.problem

    def check(self, *, is_whole: bool = False) -> None:
        """Raise `RecoveringError` until the log is read, and `GatewayStoppingError` once sessions are handed over.

        With `is_whole`, raise `RecoveringError` also until all that was read is restored.
        """
        if self.is_over:
            raise GatewayStoppingError
        if self._why is not None:
            # The problem is the log's and `/ready`'s to tell: it has the store's path and another gateway's process.
            raise RecoveringError(self._why if self.log.problem is None else "the store cannot be used")
        if is_whole and self._left:
            raise RecoveringError("not all of them are restored")
        if self.membership is not None and self.log.problem is not None:
            raise UnreachableStoreError

    def make(self, tenant: str, name: str) -> None:
        """Restore what has this name now, if it was read and not restored yet."""
        for make in self._left.pop((tenant, name), ()):
            make()

    def new(self, tenant: str, session_id: str, *, durable: bool) -> Unrecorded:
        """The record of a new session. Raises `NotStoredError` for a durable one while the store cannot be written."""
        if not durable:
            return self._in_memory(tenant, session_id)
        if self.membership is not None:
            self.membership.owns(tenant, session_id)
        if self.log.problem is not None:
            raise NotStoredError
        return self._record(StreamKey(SESSION, tenant, session_id))

    def _in_memory(self, tenant: str, session_id: str) -> Unrecorded:
        membership = self.membership
        if membership is None or membership.has(tenant, session_id):
            return UNRECORDED
        return Claimed(asyncio.ensure_future(membership.claim(tenant, session_id)))

    def unix_s(self, now_s: float) -> float:
        return now_s + self._offset_s

    def forgotten(self, tenant: str, session_id: str) -> None:
        """Remove the stream that has the id refused."""
        self.append([Change(StreamKey(DELETED, tenant, session_id), 0.0, None)])

    def append(self, changes: Sequence[Change]) -> None:
        if self._is_frozen:
            return
        if self._together is None:
            self.log.append(changes)
            self._compaction.appended(changes)
        else:
            self._together += changes
        if self.membership is not None and len(changes) == 1 and changes[0].data is None:
            self.membership.has_ended(changes[0].stream.tenant, changes[0].stream.name)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make one batch of what is appended in the block: all of it is stored or nothing. Blocks may be nested."""
        if self._together is not None:
            yield
            return
        self._together = []
        try:
            yield
        finally:
            changes, self._together = self._together, None
            if changes:
                self.log.append(changes)
                self._compaction.appended(changes)

    async def committed(self, stream: StreamKey) -> bool:
        """Wait until all that was appended is stored. False if it cannot be, or if the stream has lost an event.

        Raises `UnreachableStoreError` instead if several gateways share the store.
        """
        is_stored = await self.log.committed(stream)
        if not is_stored and self.membership is not None:
            raise UnreachableStoreError
        return is_stored

    async def recover(self, runner: CallRunner, responses: StoredResponses, router: Router) -> None:
        """Wait for the lease, read, replay all sessions, and start their calls when there are engines."""
        self._offset_s = time.time() - loop_time_s()
        self._parts = runner, responses, router
        if not self.log.is_started:
            self.log.start()
        streams = await self.log.streams()
        rest = (self._restore if self.membership is None else self.membership.take)(streams)
        self._why = None
        await rest
        if self._starting:
            await asyncio.wait(self._starting)

    def _restore(self, streams: Sequence[StoredStream]) -> Awaitable[None]:
        """Have `make` restore these streams from now on.

        The awaitable restores those that no request needs. Interrupted calls start after that, when there are engines.
        """
        assert self._parts is not None
        runner, responses, router = self._parts
        begun_s, start, models = loop_time_s(), asyncio.Event(), set[str]()
        makes = {
            SESSION: partial(self._make_session, runner=runner, start=start, models=models),
            DELETED: partial(self._refuse, runner=runner),
            RESPONSE: partial(responses.restore, offset_s=self._offset_s, now_s=begun_s),
            LOST: partial(self._set_aside, problem="its names are gone"),
        }
        self._compaction.read(streams)
        for stream in streams:
            kind, tenant, name = stream.key
            if kind in makes:
                self._left.setdefault((tenant, name), []).append(partial(self._read, stream, makes[kind]))

        async def rest() -> None:
            turns = runner.turns
            await turns.charged(RESTORING, turns.run(RESTORING, self._made(streams)))
            log.info("sessions recovered", streams=len(streams), seconds=round(loop_time_s() - begun_s, 3))
            starting = asyncio.create_task(_when_engines_are_there(router, models, start), name="store-start")
            self._starting.add(starting)
            starting.add_done_callback(self._starting.discard)

        return rest()

    def hand_over(self, runner: CallRunner) -> None:
        """The gateway stops: leave the durable sessions to the next gateway.

        Clients that wait for a variable, or for a call that has not begun, get an error that asks them to retry.
        Running calls may end here, and their values are written. No further call is started. If several gateways share
        the store, each session is released as soon as none of its calls runs here and no program is entering it.
        """
        self.is_over = True
        runner.handed_over.set()
        if self.membership is not None:
            self.membership.is_leaving = True
            self._leaving = asyncio.ensure_future(self._leave(self.membership, runner))
        for session in runner.executor.sessions:
            if session.record.stores:
                _tell_waiting(session)

    async def _leave(self, membership: Membership, runner: CallRunner) -> None:
        """Release the sessions to other gateways, one by one."""
        while not self._is_frozen:
            kept = set[tuple[str, str]]()
            for session in list(runner.executor.sessions):
                if session.record.stores and not session.graph.counts[CallState.RUNNING] and not session.is_entered:
                    self._end_here(runner, session, GatewayStoppingError())
                else:
                    kept.add((session.tenant.name, session.session_id))
            with suppress(StoreError):
                await membership.leave(but=kept)
            await asyncio.sleep(LEAVE_S)

    def _end_here(self, runner: CallRunner, session: Session, error: PlaitError) -> None:
        """End a session in memory only: another process continues it, so its end must not be written."""
        was_frozen, self._is_frozen = self._is_frozen, True
        runner.executor.endings.end(session, error, loop_time_s())
        self._is_frozen = was_frozen

    def _lose(self) -> None:
        """The lease is lost, and other gateways own the sessions: end them here with an error, and begin anew."""
        assert self._parts is not None
        assert self.membership is not None
        runner, responses, _ = self._parts
        count = len(runner.executor.sessions)
        log.error("this gateway was given up: other gateways go on with its sessions", sessions=count)
        self._why = "its lease is over"
        for session in list(runner.executor.sessions):
            self._end_here(runner, session, GivenUpError())
        responses.clear()
        self._left.clear()
        self._compaction.forget()
        self.membership.lost()
        self.log.reopen()
        self._restart = asyncio.ensure_future(self.recover(*self._parts))

    def freeze(self) -> None:
        self._is_frozen = True

    async def close(self) -> None:
        """Write what is left, and release the lease."""
        self._compaction.close()
        for task in (*self._starting, self._restart, self._leaving):
            if task is not None:
                task.cancel()
        await self.log.close()

    def _made(self, streams: Sequence[StoredStream]) -> Pieces[None]:
        """Restore the streams that are left, the oldest first."""
        for stream in streams:
            if self.is_over:
                return
            self.make(stream.key.tenant, stream.key.name)
            yield

    def _read(self, stream: StoredStream, make: Callable[[StoredStream], None]) -> None:
        """Restore one stream with `make`. A stream that cannot be read is set aside; all others go on."""
        if stream.problem is not None:
            self._set_aside(stream, stream.problem)
            return
        try:
            make(stream)
        except msgspec.MsgspecError as error:
            self._set_aside(stream, str(error))
        except Exception as error:  # noqa: BLE001 - a defect must not cost all other sessions
            self._set_aside(stream, str(error), error)

    def _set_aside(self, stream: StoredStream, problem: str, error: Exception | None = None) -> None:
        self.damage.found("stream")
        kind, tenant, name = stream.key
        log.error(
            "a stream of the store cannot be read: it was set aside",
            kind=kind, tenant=tenant, name=name, events=len(stream.events), problem=problem,
            exc_info=error,
        )  # fmt: skip
        self.log.append(set_aside(stream))
        if self.membership is not None:
            self.membership.has_ended(tenant, name)

    def _make_session(self, stream: StoredStream, runner: CallRunner, start: asyncio.Event, models: set[str]) -> None:
        events: list[SessionEvent] = [decoded(change) for change in stream.events]
        if not events:
            return  # in a shared store: the name of a session that is in memory only
        if runner.executor.sessions.has(stream.key.tenant, stream.key.name):
            return  # a recovery that began again has replayed it before
        if not isinstance(events[0], Opened):
            raise msgspec.ValidationError("its beginning is gone")
        now_s, sessions = loop_time_s(), runner.executor.sessions
        created_s, used_s = (stream.events[place].at_unix_s - self._offset_s for place in (0, -1))
        session = sessions.restore(stream.key.tenant, stream.key.name, created_s, events[0].ttl_s)
        session.touch(now_s)

        def when_whole(session: Session) -> None:
            session.record_in(self._record(stream.key))

        try:
            Replay(runner, self._again(), session, start, models, now_s).run(events, when_whole)
        except Exception:
            self._end_here(runner, session, SessionEndedError("The session cannot be made again after a restart."))
            raise
        if session.is_idle:
            session.stay(used_s)
            if session.expires_s <= now_s:
                runner.executor.endings.end(session, "has expired", now_s)

    def _again(self) -> Mapping[str, Again]:
        """By the kind of a logged request: what makes its call again."""
        assert self._parts is not None
        return {**AGAIN, "response": partial(responding_again, self._parts[1])}

    def _refuse(self, stream: StoredStream, runner: CallRunner) -> None:
        for change in stream.events:
            event, now_s = decoded(change), loop_time_s()
            if isinstance(event, Refused):
                until_s = event.until_unix_s - self._offset_s
                runner.executor.sessions.deleted.add(stream.key.tenant, stream.key.name, now_s, until_s)

    def _record(self, stream: StreamKey) -> Recorded:
        return Recorded(self, stream, self._offset_s)


async def _when_engines_are_there(router: Router, models: Collection[str], start: asyncio.Event) -> None:
    """Set `start` when there are engines for all of the models, or after `FLEET_S`."""

    def has_engine(model: str) -> bool:
        return bool(router.models.able(router.models.target(model)))

    try:
        async with asyncio.timeout(FLEET_S):
            while not all(map(has_engine, models)):  # noqa: ASYNC110 - engines do not tell
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        log.warning("no engine for calls that were interrupted", models=sorted(models))
    start.set()


def _tell_waiting(session: Session) -> None:
    """Send the clients away that wait for a variable, or for the answer of a call that has not begun."""
    for getter in [getter for getters in session.getters.values() for getter in getters]:
        getter.on_failed(GatewayStoppingError())
    for call in [*session.calls.values()]:
        if isinstance(call.owner, ChainedCall) and session.graph.call_state(call.call_id) is CallState.WAITING:
            call.owner.on_failed(GatewayStoppingError())
