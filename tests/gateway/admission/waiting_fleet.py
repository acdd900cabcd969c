"""A fleet with admission in virtual time: two engines that compute 1,000 tokens a second, without a network."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

from plait.backends.errors import PlaitError
from plait.backends.protocol.cache_state import OutstandingCall
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.queue import COLD
from plait.gateway.admission.tenants import UNLIMITED, TenantLimits
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import Event
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from plait.policy.types import Call, Objective, Slo
from tests.invariants import check, check_admission

COSTS = CostModel(PiecewiseLinear(((0, 0.010),), 0.001), 0.0, 0.0, 0.0, LongAttention())
BLOCK_TOKENS = 64
COMPUTED = OutstandingCall(0, "other", 0, 0, is_urgent=False, is_computed=False, hashes=[])


class WaitingFleet:
    """Engines by name. `max_wait_s` bounds what waits before any call has left.

    If the fleet `is_busy`, each engine computes a prompt of somebody else all the time, which goes before all
    others. They serve calls on time first if told so (`urgent_first`).
    All tenants have the `limits`, which may change. `entered` has the calls that were taken, in this order, until they
    leave.
    """

    def __init__(
        self,
        *engines: str,
        limits: TenantLimits = UNLIMITED,
        max_wait_s: float = 1e9,
        ahead_s: float = 1.0,
        weights: Mapping[str, float] | None = None,
        kv_tokens: int | None = None,
        is_busy: bool = False,
        urgent_first: bool = False,
    ) -> None:
        self.now_s = 0.0
        self.limits = limits
        self.router = Router()
        for name in engines:
            self.router.add_engine(name, COSTS, kv_tokens=kv_tokens)
            self.router.health.answered(name, {"m": None})
            self.router.engines[name].view.urgent_first = urgent_first
            if is_busy:
                others = self.router.engines[name].cache.others
                others.apply([COMPUTED], (), 0.0, snapshot=True, blocks=False)
        self.admission = Admission(
            self.router, self._at, lambda _: self.limits, max_wait_s=max_wait_s / COLD, ahead_s=ahead_s, weights=weights
        )
        self.entered: list[Waiting] = []
        self.sent: list[Waiting] = []
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def enter(
        self,
        tenant: str = "a",
        tokens: int = 900,
        *,
        prefix: int | None = None,
        ttft_s: float | None = None,
        jct_s: float | None = None,
        objective: Objective | None = None,
        priority: int = 0,
        session: str = "",
        run: str = "",
        is_final: bool = False,
        passes: bool = False,
        is_line: bool = False,
    ) -> Waiting:
        """A call arrives. Its blocks are those of the `prefix`, if it has one, else its own. Raises as `enter` does."""
        number = next(self._numbers)
        first = number * 1_000_000 if prefix is None else -1_000_000 * (prefix + 1)
        call = Call(
            f"c{number}",
            "m",
            tokens,
            BLOCK_TOKENS,
            [abs(first) + block for block in range(tokens // BLOCK_TOKENS)],
            slo=Slo(ttft_s, None, jct_s) if ttft_s or jct_s else None,
            objective=objective,
            priority=priority,
            arrived_s=self.now_s,
            is_line=is_line,
        )
        waiting = Waiting(
            tenant, tokens + 10, call=call, output_tokens=10,
            session=session, run=run, is_final=is_final, passes=passes,
        )  # fmt: skip
        waiting.tell = lambda: None if waiting.error is not None else self.sent.append(waiting)
        self.admission.enter(waiting, self.now_s)
        self.entered.append(waiting)
        if waiting.is_sent:
            self.sent.append(waiting)
        self.settle()
        return waiting

    def first_byte(self, waiting: Waiting) -> None:
        """An engine has computed the prompt of a call."""
        assert waiting.booking is not None
        self.router.first_token(waiting.booking, self.now_s)
        self.settle()

    def end(self, waiting: Waiting, output_tokens: int = 10) -> None:
        """A call gets its whole answer."""
        assert waiting.booking is not None
        self.entered.remove(waiting)
        usage = CallUsage(waiting.call.prompt_tokens, output_tokens, 0)
        self.router.settle(waiting.booking, usage, self.now_s)
        self.admission.left(waiting, usage.prompt_tokens + output_tokens, self.now_s)
        self.settle()

    def go(self, waiting: Waiting) -> None:
        """The client of a waiting call goes."""
        self.entered.remove(waiting)
        self.admission.gone(waiting, self.now_s)
        self.settle()

    def pass_time(self, seconds: float) -> None:
        """Time passes, and what is due happens."""
        end_s = self.now_s + seconds
        while self._events and self._events[0][0] <= end_s:
            self.settle_next()
        self.now_s = end_s

    def settle(self) -> None:
        """What is due now happens."""
        self.pass_time(0.0)
        check_admission(self.admission, self.entered)
        check(self.router)

    def settle_next(self) -> None:
        """The next event happens."""
        when_s, _, event = heapq.heappop(self._events)
        self.now_s = max(self.now_s, when_s)
        event(self.now_s)

    def engine_of(self, waiting: Waiting) -> str | None:
        """Where a call is booked; None if it is not placed."""
        return None if waiting.booking is None else waiting.booking.placement.engine_id

    def serve(self, calls: int) -> list[Waiting]:
        """Compute and end so many calls in the order of sending; they have to be there."""
        served = []
        for _ in range(calls):
            one = next(waiting for waiting in self.sent if waiting in self.entered)
            self.pass_time(1.0)
            self.first_byte(one)
            self.end(one)
            served.append(one)
        return served

    def errors(self) -> list[PlaitError]:
        """The errors of the calls that were given up."""
        return [waiting.error for waiting in self.entered if waiting.error is not None]

    def _at(self, when_s: float, event: Event) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._numbers), event))
