"""The gate before placement: the asyncio shell of admission. A call that has to wait, waits here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from plait.backends.errors import PlaitError
from plait.gateway.admission.admission import Admission, Turns
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s
from plait.policy.admission.fair_queue import Ticket
from plait.policy.types import Objective

POLL_S = 0.02
"""While calls wait, the engines are looked at so often: first bytes make room too."""

EXPECTED_OUTPUT_TOKENS = 128
"""Counted for a call whose output limit is larger or absent, until it has ended."""

DECODE_SHARE = 1 / 16
"""The part of its decode that a call is counted with: engines decode many calls at once. `DrainRate` corrects it."""

Predicted = Callable[[str, int, int | None], float]
"""The seconds that a call takes alone: model, prompt tokens, output tokens."""


class Gate:
    """Lets calls through to placement. `predicted_s` predicts their work."""

    def __init__(self, admission: Admission, predicted_s: Predicted, supervisor: Supervisor) -> None:
        self.admission = admission
        self._predicted_s = predicted_s
        self._supervisor = supervisor
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._is_polling = False

    async def enter(self, delivery: Delivery) -> Ticket:
        """Return once the call may be placed; `left` has to follow. Raises `LimitError` if it is refused."""
        ticket, now_s = _ticket(delivery), loop_time_s()
        if self.admission.admits(ticket, now_s):
            return ticket
        ticket.work_s = self._work_s(delivery)
        turns = self.admission.wait(ticket, now_s)
        if turns.admitted == (ticket,):
            return ticket
        for one, error in turns.shed:
            if one is ticket:
                self._tell(Turns(turns.admitted, tuple(other for other in turns.shed if other[0] is not ticket)))
                raise error
        waiter = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._tell(turns)
        self._poll_while_waiting()
        is_through = False
        try:
            await waiter
            is_through = True
        finally:
            del self._waiting[ticket]
            if not is_through:
                self._gone(ticket, waiter)
        return ticket

    def placed(self, ticket: Ticket, now_s: float) -> None:
        """The call is on an engine."""
        self._tell(self.admission.placed(ticket, now_s))

    def left(self, ticket: Ticket, usage: CallUsage | None) -> None:
        """The call has ended."""
        self.admission.left(ticket, None if usage is None else usage.prompt_tokens + usage.output_tokens)
        if self._waiting:
            self._tell(self.admission.poll(ticket.model, loop_time_s()))

    def _work_s(self, delivery: Delivery) -> float:
        """The engine time that a call is counted with while it waits."""
        call, output_tokens = delivery.call, _output_tokens(delivery)
        return self._predicted_s(call.model, call.prompt_tokens, max(1, round(DECODE_SHARE * output_tokens)))

    def _gone(self, ticket: Ticket, waiter: asyncio.Future[None]) -> None:
        """The call was refused, or its client has gone."""
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.left(ticket, None)  # it had been let through in this moment
        else:
            self.admission.give_up(ticket)

    def _tell(self, turns: Turns) -> None:
        for ticket in turns.admitted:
            waiter = self._waiting.get(ticket)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            else:
                self.left(ticket, None)  # its client has gone in this moment
        for ticket, error in turns.shed:
            self._refuse(ticket, error)

    def _refuse(self, ticket: Ticket, error: PlaitError) -> None:
        waiter = self._waiting.get(ticket)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _poll_while_waiting(self) -> None:
        if not self._is_polling:
            self._is_polling = True
            self._supervisor.start("admission", self._poll)

    async def _poll(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(POLL_S)
                for model in self.admission.models:
                    self._tell(self.admission.poll(model, loop_time_s()))
        finally:
            self._is_polling = False


def _output_tokens(delivery: Delivery) -> int:
    """The tokens that a call is expected to generate."""
    return min(EXPECTED_OUTPUT_TOKENS, delivery.call.output_limit or EXPECTED_OUTPUT_TOKENS) * delivery.choices


def _ticket(delivery: Delivery) -> Ticket:
    """A call's ticket. Its work is predicted only if it has to wait."""
    call = delivery.call
    return Ticket(
        delivery.tenant,
        call.model,
        call.prompt_tokens + _output_tokens(delivery),
        session=delivery.turn_of,
        for_throughput=call.objective is Objective.THROUGHPUT,
    )
