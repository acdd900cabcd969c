"""An engine's outstanding work: the work that its calls still have to do, by objective.

Seconds are counted for latency and throughput calls only, because only they harm each other (see `harm`). Other calls
count with their KV tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from plait.policy.types import Objective


class Work(NamedTuple):
    """One call's work on its engine: seconds of engine time if it ran alone, and tokens of KV cache.

    `objective` is the call's `served_as`.
    """

    objective: Objective | None = None
    application: str | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_tokens: float = 0.0

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + self.decode_s


@dataclass(slots=True, eq=False)
class Backlog:
    """The outstanding work of the calls with one objective, in seconds of engine time."""

    calls: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + self.decode_s

    def change(self, calls: int, prefill_s: float, decode_s: float) -> None:
        """Add to the sums; negative values subtract. The sums are 0 if no call is left."""
        self.calls += calls
        self.prefill_s = max(0.0, self.prefill_s + prefill_s) if self.calls else 0.0
        self.decode_s = max(0.0, self.decode_s + decode_s) if self.calls else 0.0


class OutstandingWork:
    """One engine's outstanding work. `kv_tokens` is the KV cache that its calls take, without their cached tokens."""

    __slots__ = ("applications", "backlogs", "calls", "kv_tokens")

    def __init__(self) -> None:
        self.calls = 0
        self.kv_tokens = 0.0
        self.backlogs = {objective: Backlog() for objective in Objective}
        self.applications: dict[str, int] = {}

    def __repr__(self) -> str:
        seconds = {objective.value: round(backlog.total_s, 3) for objective, backlog in self.backlogs.items()}
        return f"OutstandingWork(calls={self.calls}, kv_tokens={self.kv_tokens:.0f}, seconds={seconds})"

    def add(self, work: Work) -> None:
        """A call was booked."""
        self._change(work, 1)

    def remove(self, work: Work) -> None:
        """A call ended; `work` is the rest of its work."""
        self._change(work, -1)

    def prefilled(self, work: Work) -> Work:
        """A call's prompt has been computed. Returns the rest of the call's work."""
        if work.objective is None:
            return work
        self.backlogs[work.objective].change(0, -work.prefill_s, 0.0)
        return work._replace(prefill_s=0.0)

    def check(self, works: list[Work] | None = None) -> None:
        """Assert the invariants; for tests. `works`, if given, are the outstanding works: the sums must be theirs."""
        assert sum(backlog.calls for backlog in self.backlogs.values()) <= self.calls
        assert all(count > 0 for count in self.applications.values())
        assert sum(self.applications.values()) <= self.calls
        if works is None:
            return
        assert self.calls == len(works)
        assert abs(self.kv_tokens - sum(work.kv_tokens for work in works)) < 1e-6
        names = {work.application for work in works} - {None}
        assert self.applications == {name: sum(work.application == name for work in works) for name in names}
        for objective, backlog in self.backlogs.items():
            mine = [work for work in works if work.objective is objective]
            assert backlog.calls == len(mine)
            assert abs(backlog.prefill_s - sum(work.prefill_s for work in mine)) < 1e-6
            assert abs(backlog.decode_s - sum(work.decode_s for work in mine)) < 1e-6

    def _change(self, work: Work, sign: int) -> None:
        self.calls += sign
        self.kv_tokens = self.kv_tokens + sign * work.kv_tokens if self.calls else 0.0  # 0.0 drops rounding errors
        if work.objective is not None:
            self.backlogs[work.objective].change(sign, sign * work.prefill_s, sign * work.decode_s)
        if work.application is not None:
            count = self.applications.pop(work.application, 0) + sign
            if count:
                self.applications[work.application] = count
