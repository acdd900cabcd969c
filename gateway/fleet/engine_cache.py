"""One engine's cache as the gateway knows it: by the engine's reports, or estimated from the calls placed there.

Part of the router's state, and of `FleetEngine`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from plait.backends.protocol.cache_state import CacheState, EngineKind
from plait.gateway.fleet.tokenizer_agreement import UNKNOWN, Agreement
from plait.policy.placement.engine_view import EngineView
from plait.policy.prefix.expected_evictions import ExpectedEvictions
from plait.policy.prefix.node import Node

SLO_SCHEDULER = "slo"
"""The local scheduler that serves calls with a TTFT before others, by its name in `local_scheduler.SCHEDULERS`."""


@dataclass(slots=True, eq=False)
class EngineCache:
    """The cache of the engine of `view`, in tree blocks of `block_tokens`.

    `kv_tokens` bounds the estimate while the engine does not report; None: not known. `reports` says whether the cache
    is known by reports; None: not known yet. If not, the engine may report all the same: then `kind` is set, and
    `agreement` says what is wrong with its tokenizer. `epoch` and `cursor` are those of the report that changes are
    asked for since. `last_report` is the latest. `problem` says why an engine that has our plugin has no usable report,
    or gets no token ids. `unconfirmed` holds the end time and the prefix of each ended call, until a report that was
    requested after that time confirms the prefix. `evictions` are expected for the prompts still to be computed.
    """

    view: EngineView
    block_tokens: int
    kv_tokens: int | None
    epoch: str | None = None
    cursor: int | None = None
    reports: bool | None = None
    kind: EngineKind | None = None
    agreement: Agreement = UNKNOWN
    problem: str | None = None
    last_report: CacheState | None = None
    report_number: int = 0
    unconfirmed: deque[tuple[float, Node]] = field(default_factory=deque)
    evictions: ExpectedEvictions = field(init=False)

    def __post_init__(self) -> None:
        self.evictions = ExpectedEvictions(self.view.residency, self.block_tokens)

    @property
    def estimated_tokens(self) -> int | None:
        """The size of an estimated cache; None if it is not known."""
        report = self.last_report
        return self.kv_tokens if report is None else report.kv.total_blocks * report.block_tokens

    def report(self, state: CacheState, requested_s: float, agreement: Agreement) -> bool:
        """Apply a report that was requested at `requested_s`. Returns whether the engine has worked since the last one.

        Where the tokenizer is not agreed on, the report's blocks are not those of the gateway's prompts: the cache is
        estimated. So it is after a report that raises ValueError: it cannot be true, or its blocks have another size
        than the tree's.
        """
        try:
            state.check()
            return self._apply(state, requested_s, agreement)
        except ValueError:
            self.view.residency.resident.clear()
            self.no_reports()
            raise

    def no_reports(self, problem: str | None = None) -> None:
        """The engine has no usable report. Its cache is estimated from the calls placed there."""
        self.problem = problem
        self.reports, self.cursor, self.epoch, self.kind = False, None, None, None
        self.agreement, self.last_report = UNKNOWN, None
        self.view.slots = 0
        self.report_number += 1
        self._assume_unconfirmed()

    def lost(self) -> None:
        """The engine cannot be reached. It may come back with another tokenizer, before its first report."""
        self.agreement = UNKNOWN

    def forget(self) -> None:
        """Another process serves from now on. Nothing is known of its cache, but calls are still booked here."""
        self.view.residency.resident.clear()
        while self.unconfirmed:
            self.view.residency.unbook(self.unconfirmed.popleft()[1])
        self.no_reports()
        self.reports = None

    def ended(self, leaf: Node, now_s: float) -> None:
        """A call has ended, so its prefix is stored. If the engine reports, a later report has to confirm it."""
        if self.reports:
            self.view.residency.touch(leaf)
            self.unconfirmed.append((now_s, leaf))
        else:
            self._assume_stored(leaf)

    def _apply(self, state: CacheState, requested_s: float, agreement: Agreement) -> bool:
        if state.granularity_tokens != self.block_tokens:
            raise ValueError(
                f"engine {self.view.engine_id} reports its cache in blocks of {state.granularity_tokens} tokens, "
                f"but the prefix tree has blocks of {self.block_tokens}; its cache is estimated instead"
            )
        last, was_estimated = self.last_report, self.kind is not None and not self.reports
        if agreement.problem is not None:
            self._estimate(state)
        elif was_estimated and not state.snapshot:
            self.cursor = self.epoch = None  # the blocks of earlier reports are missing: the next one shall have all
        else:
            self._take_blocks(state, requested_s)
        self.kind, self.agreement, self.problem = state.kind, agreement, agreement.problem
        scheduler = state.scheduler
        self.view.use_report(
            state.iteration.budget_tokens, urgent_first=scheduler.policy == SLO_SCHEDULER, slots=scheduler.slots
        )
        self.last_report = msgspec.structs.replace(state, stored=[], removed=[])
        self.report_number += 1
        return last is None or (state.cursor, state.iteration) != (last.cursor, last.iteration)

    def _take_blocks(self, state: CacheState, requested_s: float) -> None:
        """Take over what the engine has stored and removed."""
        residency = self.view.residency
        if state.snapshot or state.epoch != self.epoch:
            residency.resident.clear()
        residency.resident.apply(state.removed, ((run.parent, run.hashes) for run in state.stored))
        self.reports, self.epoch, self.cursor = True, state.epoch, state.cursor
        self.view.free_tokens = float(state.kv_free_tokens)
        while self.unconfirmed and self.unconfirmed[0][0] <= requested_s:
            residency.unbook(self.unconfirmed.popleft()[1])
        self.evictions.update(state.kv_free_tokens)

    def _estimate(self, state: CacheState) -> None:
        """The engine's blocks have names that the gateway's prompts do not have. A new process has an empty cache."""
        if state.epoch != self.epoch:
            self.view.residency.resident.clear()
        self.reports, self.epoch, self.cursor = False, state.epoch, state.cursor
        self._assume_unconfirmed()

    def _assume_unconfirmed(self) -> None:
        """From now on the cache is estimated."""
        self.view.free_tokens = None
        self.evictions.update(None)
        while self.unconfirmed:
            self._assume_stored(self.unconfirmed.popleft()[1])

    def _assume_stored(self, leaf: Node) -> None:
        residency = self.view.residency
        residency.resident.store_path(leaf)
        residency.unbook(leaf)
        if self.estimated_tokens is not None:
            residency.evict(len(residency.resident) - self.estimated_tokens // self.block_tokens)
