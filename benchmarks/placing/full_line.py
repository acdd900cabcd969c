"""Calls through admission, in CPU time: with nobody waiting, and with many calls in the lines of the engines."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf

from plait.backends.profiles import load_profile
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.admission.tenants import UNLIMITED
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import Event
from plait.policy.types import Call

EVENTS_S = 0.005
"""Between two rounds of first bytes and ends."""

RUNNING_PER_ENGINE = 16


class FullLine:
    """So many calls wait at all times: for each that is sent, another one enters. With none, each is sent at once."""

    def __init__(self, profile: str, calls: Iterator[Call], engines: int, waiting: int, output_tokens: int) -> None:
        loaded = load_profile(profile)
        self.router = Router()
        for number in range(engines):
            self.router.add_engine(f"e{number}", loaded.cost_model(), kv_tokens=loaded.kv.tokens)
            self.router.health.answered(f"e{number}", {next(calls).model: None})
        ahead_s = AHEAD_S if waiting else inf
        self.admission = Admission(self.router, self._at, lambda _: UNLIMITED, max_wait_s=inf, ahead_s=ahead_s)
        self._calls = calls
        self._kept = RUNNING_PER_ENGINE * engines
        self._output_tokens = output_tokens
        self._events: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._computing: dict[str, deque[Waiting]] = {f"e{number}": deque() for number in range(engines)}
        self._running: deque[Waiting] = deque()
        self._entered: deque[Waiting] = deque()
        self._left_to_send = 0
        for _ in range(waiting):
            self._enter(next(calls))
        self.run(2 * self._kept)

    def run(self, calls: int) -> float:
        """So many calls pass; microseconds of CPU time each."""
        spent_ns, passed = 0, 0
        while passed < calls:
            entering = max(1, self._left_to_send)
            prompts = [next(self._calls) for _ in range(entering)]
            self._left_to_send = 0
            began_ns = time.thread_time_ns()
            for call in prompts:
                self._enter(call)
            self._now_s += EVENTS_S
            self._go_on()
            spent_ns += time.thread_time_ns() - began_ns
            passed += entering
        return spent_ns / 1e3 / passed

    def _enter(self, call: Call) -> None:
        waiting = Waiting("tenant", call.prompt_tokens + self._output_tokens, call=call)
        self.admission.enter(waiting, self._now_s)
        if waiting.is_sent:
            self._sent(waiting, waits=False)
        else:
            waiting.tell = lambda: self._sent(waiting, waits=True)

    def _sent(self, waiting: Waiting, *, waits: bool) -> None:
        assert waiting.booking is not None
        self._left_to_send += waits
        self._computing[waiting.booking.placement.engine_id].append(waiting)

    def _go_on(self) -> None:
        """Each engine's oldest prompt gets its first token, the oldest calls end, and what is due happens."""
        for computing in self._computing.values():
            if computing:
                first = computing.popleft()
                assert first.booking is not None
                self.router.first_token(first.booking, self._now_s)
                self._running.append(first)
        while len(self._running) > self._kept:
            ended = self._running.popleft()
            assert ended.booking is not None
            self.router.settle(
                ended.booking, CallUsage(ended.call.prompt_tokens, self._output_tokens, None), self._now_s
            )
            self.admission.left(ended, ended.tokens, self._now_s)
        while self._events and self._events[0][0] <= self._now_s:
            heappop(self._events)[2](self._now_s)

    def _at(self, when_s: float, event: Event) -> None:
        heappush(self._events, (when_s, next(self._numbers), event))
