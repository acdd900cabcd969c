"""The gate: places calls through admission, and keeps those that must wait.

Admission (`plait.gateway.admission`) is synchronous and decides; the gate adds the event loop. `enter`
raises if the call is refused. A call that must wait is resumed once: when it may be sent, or with an error when
admission fails it or `hold_s` is over. If its client disconnects first, `gone` ends the wait. If several gateways share
tenants' rates, the gate asks their store before admission, except for a retry that keeps its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.calls.call import NO_SLOT, Asked
from plait.gateway.timer import loop_time_s

EXPECTED_OUTPUT_TOKENS = 128
"""Charged to the tenant's rate for each completion while the call runs, unless the call's output limit is smaller."""

Resume = Callable[[BaseException | None], None]


class Entry(msgspec.Struct, eq=False):
    """The gate's record of a call, around admission's (`waiting`). Only the gate changes it."""

    waiting: Waiting

    resume: Resume
    """Called once for a call that had to wait: with None if it may be sent, else with its error."""

    timer: asyncio.Handle | None = None
    """First the timer of `hold_s`; once admission has decided, the handle that calls `resume`."""

    leasing: asyncio.Future[None] | None = None
    """The request to the gateways' store, while it runs."""


class Gate:
    """Places calls, and lets them through when their engines have room.

    A stream's client gets keep-alive comments while its call waits. Any other client waits in admission for
    `hold_s` seconds at most, and then gets an error that asks it to come back.
    """

    def __init__(self, admission: Admission, hold_s: float) -> None:
        self.admission = admission
        self.leases: RateLeases | None = None
        """Set if several gateways share the rates of tenants."""
        self._hold_s = hold_s

    def enter(
        self,
        asked: Asked,
        prefer: str | None,
        resume: Resume,
        *,
        may_leave: bool,
        first: Sequence[Awaitable[None]] = (),
    ) -> Entry:
        """Ask admission to place the call. Raises `PlaitError` if the call is refused at once.

        If `waiting.is_sent`, the call may be sent now. Otherwise `resume` is called later, once. With `may_leave`, a
        call that still waits after `hold_s` fails, and the client may come back. `prefer` is the engine with the
        context that the call continues, and `first` is what the call waits for before. The caller must call `left` when
        a sent call has ended, and `gone` if the client disconnects before the call is sent.
        """
        call = asked.call
        limit = call.output_limit
        each_tokens = limit if limit and limit < EXPECTED_OUTPUT_TOKENS else EXPECTED_OUTPUT_TOKENS
        output_tokens = each_tokens * asked.choices
        waiting = Waiting(
            asked.tenant,
            call.prompt_tokens + output_tokens,
            call=call,
            output_tokens=output_tokens,
            prefer=prefer,
            avoid=asked.avoids,
            route=asked.route,
            session=asked.turn_of,
            run=asked.agent.run,
            is_final=asked.agent.is_final,
            passes=asked.slot is not NO_SLOT or call.group is not None,
        )
        entry = Entry(waiting, resume)
        if first or (self.leases is not None and not self.admission.has_place(waiting)):
            entry.leasing = asyncio.ensure_future(self._lease(entry, first, may_leave=may_leave))
            entry.leasing.add_done_callback(partial(_leased, entry))
            return entry
        self._admit(entry, may_leave=may_leave)
        return entry

    def _admit(self, entry: Entry, *, may_leave: bool) -> None:
        """Ask admission now. Raises the error of a call that is neither sent nor queued."""
        waiting = entry.waiting
        self.admission.enter(waiting, loop_time_s())
        if waiting.is_sent:
            return
        if waiting.error is not None:
            raise waiting.error
        waiting.tell = partial(self._told, entry)
        if may_leave:
            entry.timer = asyncio.get_running_loop().call_later(self._hold_s, self._leave, entry)

    async def _lease(self, entry: Entry, first: Sequence[Awaitable[None]], *, may_leave: bool) -> None:
        """Wait for what comes `first`, take the call out of the tenant's rate in the gateways' store, then place it."""
        waiting, leases = entry.waiting, self.leases
        on_wait = partial(waiting.wait_for, "store")
        if first:
            on_wait(loop_time_s())
        for wait in first:
            await wait
        if leases is not None and not self.admission.has_place(waiting):
            waiting.is_leased = await leases.take(waiting.tenant, waiting.tokens, on_wait)
        try:
            self._admit(entry, may_leave=may_leave)
        except PlaitError:  # admission refused the call, so the leased tokens are unused
            if waiting.is_leased and leases is not None:
                leases.put_back(waiting.tenant, waiting.tokens)
            raise

    def spend(self, tenant: str) -> None:
        """The tenant's rate of calls also counts a request that was refused before it became a call."""
        self.admission.spend(tenant, loop_time_s())
        if self.leases is not None:
            self.leases.spend(tenant)

    def outlook(self, entry: Entry) -> str | None:
        """For a comment in the stream: the call's position in its tenant's queue, and the expected wait in seconds.

        None if the call does not wait.
        """
        waiting = entry.waiting
        if waiting.tell is None or waiting.is_sent or waiting.error is not None:
            return None
        position, expected_s = self.admission.outlook(waiting, loop_time_s())
        return f"waiting position={position} expected_s={round(expected_s)}"

    def left(self, entry: Entry, used_tokens: int | None) -> None:
        """A call that was sent has ended. `used_tokens` is None if the engine did not report its usage."""
        if entry.waiting.is_sent:
            self.admission.left(entry.waiting, used_tokens, loop_time_s())

    def gone(self, entry: Entry) -> None:
        """The client has disconnected before the call was sent, or after admission's decision but before `resume`."""
        waiting, leasing = entry.waiting, entry.leasing
        entry.leasing = None
        if entry.timer is not None:
            entry.timer.cancel()
        if leasing is not None and leasing.cancel():
            return
        if waiting.tell is not None or (leasing is not None and waiting.is_sent):
            waiting.tell = None
            self.admission.gone(waiting, loop_time_s())

    def _told(self, entry: Entry) -> None:
        """Admission has decided about a waiting call."""
        if entry.timer is not None:
            entry.timer.cancel()
        # Not at once: admission may be handling another call, and `resume` would reenter it.
        entry.timer = asyncio.get_running_loop().call_soon(_resume, entry, None)

    def _leave(self, entry: Entry) -> None:
        """`hold_s` is over."""
        _resume(entry, self.admission.leave(entry.waiting, loop_time_s()))


def _resume(entry: Entry, error: PlaitError | None) -> None:
    entry.timer = entry.waiting.tell = None
    entry.resume(error or entry.waiting.error)


def _leased(entry: Entry, leasing: asyncio.Future[None]) -> None:
    """`_lease` has ended: the call is sent, or waits, or is refused."""
    if entry.leasing is None or leasing.cancelled():  # the client has gone, or the gateway stops
        return
    entry.leasing, error = None, leasing.exception()
    # A call with `tell` set waits, or `_told` has already scheduled its `resume`.
    if error is not None or (entry.waiting.is_sent and entry.waiting.tell is None):
        entry.resume(error)
