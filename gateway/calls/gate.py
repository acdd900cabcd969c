"""The asyncio shell of admission. A call that waits for its engine, waits here."""

from __future__ import annotations

import asyncio
from functools import partial

from plait.backends.errors import NoEngineError, PlaitError
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.waiting import Waiting
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.journey import Journey, OnWait
from plait.gateway.fleet.booking import Booking
from plait.gateway.timer import loop_time_s

EXPECTED_OUTPUT_TOKENS = 128
"""Counted for a call whose output limit is larger or absent, until it has ended."""

NOTICE_S = 10.0
"""Clients and proxies give up after a minute without a byte, some after less."""


class Gate:
    """Places calls, and lets them through when their engines have room.

    A client that can be told while its call waits is told every `notice_s`.
    """

    def __init__(self, admission: Admission, notice_s: float = NOTICE_S) -> None:
        self.admission = admission
        self._notice_s = notice_s

    async def enter(self, journey: Journey, prefer: str | None) -> Booking:
        """Return the call's booking once it is to be sent; `left` has to follow. Raises `PlaitError` otherwise.

        It continues one that ran on the engine that it may `prefer`.
        """
        waiting = journey.waiting = new_waiting(journey.delivery, prefer)
        try:
            self.admission.enter(waiting, loop_time_s())
            if not waiting.is_sent:
                await self._told(waiting, journey.on_wait)
        except PlaitError as error:
            journey.outcome = "no_engine" if isinstance(error, NoEngineError) else "refused"
            raise
        assert waiting.booking is not None
        return waiting.booking

    def left(self, journey: Journey) -> None:
        """A call has ended; no effect if it was not let through."""
        if journey.waiting is not None and journey.waiting.is_sent:
            usage = None if journey.exchange is None else journey.exchange.usage
            used_tokens = None if usage is None else usage.prompt_tokens + usage.output_tokens
            self.admission.left(journey.waiting, used_tokens, loop_time_s())

    async def _told(self, waiting: Waiting, on_wait: OnWait | None) -> None:
        told = asyncio.get_running_loop().create_future()
        waiting.tell = partial(_tell, told)
        if waiting.error is None:
            try:
                while on_wait is not None and not (await asyncio.wait([told], timeout=self._notice_s))[0]:
                    await on_wait(*self.admission.backlogs[waiting.call.model].outlook(waiting))
                await told
            except asyncio.CancelledError:
                self.admission.gone(waiting, loop_time_s())
                raise
        if waiting.error is not None:
            raise waiting.error


def new_waiting(delivery: Delivery, prefer: str | None) -> Waiting:
    """A call that wants to be placed."""
    call = delivery.call
    output_tokens = min(EXPECTED_OUTPUT_TOKENS, call.output_limit or EXPECTED_OUTPUT_TOKENS) * delivery.choices
    return Waiting(
        delivery.tenant,
        call.prompt_tokens + output_tokens,
        call=call,
        output_tokens=output_tokens,
        prefer=prefer,
        avoid=delivery.avoids,
        route=delivery.route,
    )


def _tell(told: asyncio.Future[None]) -> None:
    if not told.done():
        told.set_result(None)
