"""The receipts of the newest calls and refusals, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import inf
from time import time
from typing import Final

import msgspec

from plait.backends.errors import EngineStatusError, PlaitError
from plait.gateway.admission.waits import Wait
from plait.gateway.asgi import Headers
from plait.gateway.calls.call import Asked, Ending
from plait.gateway.calls.delivery import Delivery
from plait.gateway.fleet.booking import Booking
from plait.gateway.guests.receipts.receipt import Choice, EndedWait, Limit, Move, Receipt, choice_of
from plait.gateway.guests.receipts.ring import Ring
from plait.gateway.timer import loop_time_s
from plait.policy.types import NO_SLO, Call, Placement

REFUSED_SHARE: Final = 8
"""Refusals have 1 / 8 of the memory for themselves: a flood of refusals pushes no call out."""

MOST_ID: Final = 128
"""A longer request id or name of an agent is cut."""

MOST_MESSAGE: Final = 200
"""The most characters of an error. An engine's message may quote a request."""

RUNNING: Final = "running"
"""The outcome of a call that has not ended."""

EXPLAINED: Final = "explained"
"""The outcome of a call for `POST /admin/explain`, which is not sent."""

_TRACE: Final = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-")
_ENCODER: Final = msgspec.msgpack.Encoder()
DECODER: Final = msgspec.msgpack.Decoder(Receipt)


class Receipts:
    """Keeps receipts in `max_bytes`.

    A guest that reads each receipt of a call sets `told`, and empties it again and again. One that knows prices sets
    `cost_of`, the cost of a call that has ended in 1e-9 of the currency.
    """

    def __init__(self, max_bytes: int) -> None:
        self.told: list[bytes] | None = None
        self.cost_of: Callable[[Delivery], int | None] | None = None
        self._refusals = Ring(max_bytes // REFUSED_SHARE)
        self._calls = Ring(max_bytes - max_bytes // REFUSED_SHARE)

    def ended(self, delivery: Delivery) -> None:
        ring = self._refusals if delivery.attempt is None else self._calls
        asked, encoded = delivery.asked, _ENCODER.encode(self.of(delivery))
        ring.add(hash((asked.tenant, asked.call.call_id[:MOST_ID])), encoded)
        if self.told is not None and delivery.attempt is not None:
            self.told.append(encoded)

    def no_call(self, ending: Ending) -> None:
        error = ending.error
        receipt = Receipt(
            ending.tenant,
            ending.request_id[:MOST_ID],
            _wall_s(ending.arrived_s),
            ending.path,
            ending.model,
            ending.status,
            ending.outcome,
            ending.code,
            _message(error),
            e2e_s=ending.ended_s - ending.arrived_s,
            limit=_limit(error),
            retry_after_s=getattr(error, "retry_after_s", None),
        )
        self._refusals.add(hash((ending.tenant, receipt.request_id)), _ENCODER.encode(receipt))

    def find(self, tenant: str, request_id: str) -> Receipt | None:
        """The newest receipt of a tenant's request; None if none is stored."""
        name = tenant, request_id[:MOST_ID]
        entries = [entry for ring in (self._calls, self._refusals) if (entry := ring.get(hash(name))) is not None]
        found = [one for one in map(DECODER.decode, entries) if (one.tenant, one.request_id) == name]  # hashes collide
        return max(found, key=lambda receipt: receipt.at, default=None)

    def newest(self, containing: bytes = b"") -> Iterator[Receipt]:
        """The present receipts whose encoding contains these bytes: calls before refusals, the newest first."""
        for ring in (self._calls, self._refusals):
            yield from (DECODER.decode(entry) for entry in ring.newest() if containing in entry)

    def of(self, delivery: Delivery) -> Receipt:
        """The receipt of a call, which may not have ended."""
        asked, call, attempt, ending = delivery.asked, delivery.call, delivery.attempt, delivery.ending
        now_s = loop_time_s() if ending is None else ending.ended_s
        usage = first_s = finish = None
        outcome, status = RUNNING, 200
        if attempt is not None:
            answer, first_s = attempt.answer, attempt.booking.first_token_s
            usage, finish, outcome, status = answer.usage, answer.finish, answer.outcome or RUNNING, answer.status
        error = None if ending is None else ending.error or ending.problem
        waiting = None if delivery.entry is None else delivery.entry.waiting
        arrived_s = call.arrived_s
        waits = None if waiting is None else waiting.waits
        return Receipt(
            asked.tenant,
            call.call_id[:MOST_ID],
            time() - now_s + arrived_s,
            asked.path,
            call.model,
            status if ending is None else ending.status,
            outcome if ending is None else ending.outcome,
            None if ending is None else ending.code,
            None if error is None else _message(error),
            call.prompt_tokens,
            None if usage is None else usage.cached_tokens,
            None if usage is None else usage.output_tokens,
            finish,
            None if first_s is None else first_s - arrived_s,
            now_s - arrived_s,
            None if call.slo is None or call.slo == NO_SLO else (call.slo.ttft_s, call.slo.tpot_s, call.slo.jct_s),
            _trace_id(asked.headers),
            self._choices(delivery, call),
            (() if waits is None or waiting is None else _waits(waits, waiting.waited_until_s(now_s)))
            + (() if ending is None or not ending.gateway_s else (EndedWait("gateway", ending.gateway_s),)),
            () if waiting is None or not waiting.line_changes else tuple(
                Move(one.from_id, one.to_id, one.at_s - arrived_s, one.gain_s) for one in waiting.line_changes
            ),
            None if error is None else _limit(error),
            getattr(error, "retry_after_s", None),
            asked.agent.name[:MOST_ID],
            asked.agent.parent[:MOST_ID],
            asked.slot.program,
            asked.slot.made_by and tuple([made_by[:MOST_ID] for made_by in asked.slot.made_by]),
            asked.key,
            usage,
            0 if attempt is None else attempt.answer.passed_tokens,
            None if self.cost_of is None or ending is None else self.cost_of(delivery),
            asked.is_line,
        )  # fmt: skip

    def explained(self, asked: Asked, placement: Placement) -> Receipt:
        """The receipt of a call that is only explained, with the placement that it would get."""
        call = asked.call
        choice = choice_of(placement, None, placed_s=0.0, sent_s=None, block_tokens=call.block_tokens)
        return Receipt(
            asked.tenant, call.call_id[:MOST_ID], time(), asked.path, call.model, 200, EXPLAINED,
            prompt_tokens=call.prompt_tokens, choices=(choice,),
        )  # fmt: skip

    def _choices(self, delivery: Delivery, call: Call) -> tuple[Choice, ...]:
        """All placements of a call, the failed ones first."""
        attempt, entry, tried = delivery.attempt, delivery.entry, delivery.tried
        last = None if attempt is None else attempt.booking
        if last is None and not tried and entry is not None:
            last = entry.waiting.released  # the call was placed, and never sent
        if not tried:
            return () if last is None else (_choice(call, last),)
        bookings = [(booking, cause) for booking, cause in tried if booking is not last]
        bookings += [] if last is None else [(last, tried[-1][1] if tried[-1][0] is last else "")]
        rules = [None, *("after_failure" for _ in bookings[1:])]
        return tuple(_choice(call, *one, rule) for one, rule in zip(bookings, rules, strict=True))


def _choice(call: Call, booking: Booking, ended_by: str = "", rule: str | None = None) -> Choice:
    sent_s = None if booking.sent_s == inf else booking.sent_s - call.arrived_s
    placed_s = booking.booked_s - call.arrived_s
    return choice_of(
        booking.placement,
        rule,
        placed_s=placed_s,
        sent_s=sent_s,
        block_tokens=call.block_tokens,
        ended_by=ended_by,
        estimated_tokens=None if booking.reach is None else booking.reach.anywhere * call.block_tokens,
    )


def _wall_s(event_s: float) -> float:
    """Seconds since 1970, of a time of the event loop."""
    return time() - loop_time_s() + event_s


def _waits(waits: list[Wait], until_s: float) -> tuple[EndedWait, ...]:
    ends = [*(wait.since_s for wait in waits[1:]), until_s]
    return tuple(EndedWait(wait.why, end_s - wait.since_s) for wait, end_s in zip(waits, ends, strict=True))


def _message(error: object) -> str | None:
    """An engine's message, or the gateway's own without quotes of the request."""
    if isinstance(error, PlaitError):
        said = error.message if isinstance(error, EngineStatusError) else error.logged_message
    else:
        said = error if isinstance(error, str) else None
    return said and said[:MOST_MESSAGE]


def _limit(error: object) -> Limit | None:
    reached = error.reached if isinstance(error, PlaitError) else None
    return None if reached is None else Limit(*reached)


def _trace_id(headers: Headers) -> str:
    """The trace of a request, by its `traceparent` header (W3C Trace Context); empty without one."""
    for name, value in headers:
        if name == b"traceparent":
            found = _TRACE.match(value)
            return "" if found is None else found[1].decode()
    return ""
