"""Where calls wait for their engines, for their sessions, or for their tenants' rates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from plait.backends.errors import PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.calls.call import Asked
from plait.gateway.timer import loop_time_s
from plait.policy.costs.situation import COMPARED

EXPECTED_OUTPUT_TOKENS = 128
"""Counted for a call whose output limit is larger or absent, until it has ended."""

Resume = Callable[[BaseException | None], None]


class Entry(msgspec.Struct, eq=False):
    """A call's entry in admission, which the gate changes."""

    waiting: Waiting

    resume: Resume
    """Called once for a call that had to wait: it is to be sent, or has an error."""

    timer: asyncio.Handle | None = None
    """Tells the client of a waiting call to come back; once the call is to be sent, resumes it."""

    leasing: asyncio.Future[None] | None = None
    """While the gateways' store is asked."""


class Gate:
    """Places calls, and lets them through when their engines have room.

    A client that cannot be told while its call waits is kept waiting for `hold_s`, and then told to come back.
    """

    def __init__(self, admission: Admission, hold_s: float) -> None:
        self.admission = admission
        self.leases: RateLeases | None = None
        """Where several gateways share the rates of tenants."""
        self._hold_s = hold_s

    def enter(self, asked: Asked, prefer: str | None, resume: Resume, *, may_leave: bool) -> Entry:
        """Let the call through: it is sent now if that says so. Raises `PlaitError` for one that is refused.

        If it has to wait, `resume` is called once it is to be sent, or with the error of a call that is not; a client
        that `may_leave` is told after a while to come back. `left` has to follow for a call that was sent, `gone` if
        its client goes before. It continues one that ran on the engine that it may `prefer`.
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
            compares=COMPARED if asked.wants_receipt else 0,
            passes=asked.output is not None or asked.inputs_s is not None or call.group is not None,
        )
        entry = Entry(waiting, resume)
        if self.leases is not None and not self.admission.has_place(waiting):
            entry.leasing = asyncio.ensure_future(self._lease(self.leases, entry, may_leave=may_leave))
            entry.leasing.add_done_callback(partial(_leased, entry))
            return entry
        self._admit(entry, may_leave=may_leave)
        return entry

    def _admit(self, entry: Entry, *, may_leave: bool) -> None:
        """Send a call or let it wait. Raises the error of one that does neither."""
        waiting = entry.waiting
        self.admission.enter(waiting, loop_time_s())
        if waiting.is_sent:
            return
        if waiting.error is not None:
            raise waiting.error
        waiting.tell = partial(self._told, entry)
        if may_leave:
            entry.timer = asyncio.get_running_loop().call_later(self._hold_s, self._leave, entry)

    async def _lease(self, leases: RateLeases, entry: Entry, *, may_leave: bool) -> None:
        """Admit a call that the gateways' store allows."""
        waiting = entry.waiting
        on_wait = partial(waiting.wait_for, "store")
        waiting.is_leased = await leases.take(waiting.tenant, waiting.tokens, on_wait)
        try:
            self._admit(entry, may_leave=may_leave)
        except PlaitError:  # a call that is refused there has not used what was leased for it
            if waiting.is_leased:
                leases.put_back(waiting.tenant, waiting.tokens)
            raise

    def spend(self, tenant: str) -> None:
        """A request of the tenant was refused that was no call: it counts for the rate of calls."""
        self.admission.spend(tenant, loop_time_s())
        if self.leases is not None:
            self.leases.spend(tenant)

    def outlook(self, entry: Entry) -> str | None:
        """For people: a waiting call's place among its tenant's, and the seconds that it has to wait; else None."""
        waiting = entry.waiting
        if waiting.tell is None or waiting.is_sent or waiting.error is not None:
            return None
        position, expected_s = self.admission.outlook(waiting)
        return f"waiting position={position} expected_s={round(expected_s)}"

    def left(self, entry: Entry, used_tokens: int | None) -> None:
        """A call that was sent has ended. `used_tokens` are known if an engine has told."""
        if entry.waiting.is_sent:
            self.admission.left(entry.waiting, used_tokens, loop_time_s())

    def gone(self, entry: Entry) -> None:
        """The client of a call has gone before it was sent, or in that moment."""
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
        """A call that waits is to be sent, or has an error. It goes on once the event is over."""
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer = asyncio.get_running_loop().call_soon(_resume, entry, None)

    def _leave(self, entry: Entry) -> None:
        """The client has waited for long enough: it may come back."""
        _resume(entry, self.admission.leave(entry.waiting, loop_time_s()))


def _resume(entry: Entry, error: PlaitError | None) -> None:
    entry.timer = entry.waiting.tell = None
    entry.resume(error or entry.waiting.error)


def _leased(entry: Entry, leasing: asyncio.Future[None]) -> None:
    """The store has been asked, and the call is sent, or waits, or is refused."""
    if entry.leasing is None or leasing.cancelled():  # the client has gone, or the gateway stops
        return
    entry.leasing, error = None, leasing.exception()
    if error is not None or (entry.waiting.is_sent and entry.waiting.tell is None):  # else it is told, or waits
        entry.resume(error)
