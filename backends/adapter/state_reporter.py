"""Records an engine's iterations and calls, and makes its cache-state reports (docs/design/clocks.md).

The engine's driver calls in: a call arrives (`received`), has more tokens (`produced`), ends (`ended`); an iteration
begins and ends (`Iterations`). Three parts follow the calls: `Attainment` judges each by its objectives when it ends,
`RefinableCalls` changes objectives of calls in the engine, `CallsJournal` keeps the calls to report. `report` reads
all of them and the cache's journals. All times are seconds of one clock of the driver's. An event of a call that is
unknown, or has ended, has no effect.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.calls_journal import CallsJournal
from plait.backends.adapter.hit_ends import EngineEnds
from plait.backends.adapter.tier_journal import TierJournal
from plait.backends.protocol.cache_state import (
    CacheState,
    IterationState,
    KvState,
    QueueState,
    SchedulerState,
    Tier,
)
from plait.backends.protocol.call_annotations import EngineAnnotations
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS
from plait.policy.scheduling.plan import RECENT_ITERATIONS, LocalCall


class Iterations:
    """An engine's latest iteration times, prompt chunks and queueing times (`RECENT_ITERATIONS` of each).

    Iterations begin and end in the same order; several may be in flight, as in asynchronous scheduling.
    """

    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended_s = 0.0
        self._durations_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)
        self._chunks: deque[int] = deque(maxlen=RECENT_ITERATIONS)
        self._queued_s: deque[float] = deque(maxlen=RECENT_ITERATIONS)

    @property
    def mean_queue_s(self) -> float:
        """Mean time that the recently admitted calls waited in the engine."""
        return _mean(self._queued_s)

    @property
    def last_s(self) -> float:
        """The last iteration's time; 0 before the first."""
        return self._durations_s[-1] if self._durations_s else 0.0

    def admitted(self, queued_s: float) -> None:
        """A call was scheduled for the first time, after `queued_s` in the queue.

        The time may be negative: an emulated iteration may begin a moment before the call arrives.
        """
        self._queued_s.append(max(0.0, queued_s))

    def computes(self, tokens: Iterable[int]) -> None:
        """An iteration computes these `tokens`, a number for each call. A number above 1 is a prompt chunk."""
        self._chunks.extend([chunk for chunk in tokens if chunk > 1])

    def begin(self, iteration: int, now_s: float) -> None:
        """An iteration was scheduled; `iteration` names it until it ends."""
        self._begun[iteration] = now_s

    def end(self, iteration: int, now_s: float) -> float | None:
        """An iteration's output has come. Returns the iteration's time in seconds; None if the iteration is unknown.

        If several are in flight, the time counts from the end of the one before, which the device computed until then.
        """
        begun_s = self._begun.pop(iteration, None)
        if begun_s is None:
            return None
        duration_s = now_s - max(begun_s, self._ended_s)
        self.took(duration_s)
        self._ended_s = now_s
        return duration_s

    def took(self, duration_s: float) -> None:
        """Record an iteration's time. The embedded engine calls this directly: its times are predicted."""
        self._durations_s.append(duration_s)

    def extend(self, by_s: float) -> None:
        """The last iteration takes longer than was recorded."""
        self._durations_s[-1] += by_s

    def state(self, budget_tokens: int) -> IterationState:
        """The part of the cache-state report on iterations."""
        return IterationState(
            mean_s=_mean(self._durations_s),
            max_s=max(self._durations_s, default=0.0),
            mean_chunk_tokens=_mean(self._chunks),
            budget_tokens=budget_tokens,
        )


def _mean(values: deque[float] | deque[int]) -> float:
    return sum(values) / len(values) if values else 0.0


RECENT_CALLS = 256
"""How many of the latest calls with objectives the share covers. Its standard error is at most 3 %."""


@dataclass(slots=True)
class _Progress:
    """An engine's progress on one call: its output `tokens`, and the times of the first and the last of them."""

    call: LocalCall
    zero_s: float
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def met(self, ended_s: float) -> bool | None:
        """Whether the call met all its objectives; None if it has none, or ended before its first token was due."""
        slo = self.call.slo
        if slo is None:
            return None
        ttft_s, tpot_s, jct_s = (inf if limit_s is None else limit_s for limit_s in (slo.ttft_s, slo.tpot_s, slo.jct_s))
        if not self.tokens:
            return False if ended_s - self.zero_s > min(ttft_s, jct_s) else None
        gaps = self.tokens - 1
        decoded_in_time = gaps == 0 or self.last_s - self.first_s <= tpot_s * gaps
        return decoded_in_time and self.first_s - self.zero_s <= ttft_s and self.last_s - self.zero_s <= jct_s


class Attainment:
    """SLO attainment, measured in the engine: the share of calls that met all their objectives.

    A call is judged when it ends, by its objectives at that time: TTFT and JCT from its zero, TPOT over all its tokens.
    An aborted call is judged by the tokens that it had. Calls without objectives do not count, nor do calls that end
    without a token before the first is due. `key` is the engine's name for a call.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, _Progress] = {}
        self._met: deque[bool] = deque(maxlen=RECENT_CALLS)

    @property
    def share(self) -> float | None:
        """The share of the latest `RECENT_CALLS` that met all objectives; None if no call with objectives has ended."""
        return sum(self._met) / len(self._met) if self._met else None

    def received(self, key: Hashable, call: LocalCall) -> None:
        """A call has arrived. Its `arrived_s` is its zero."""
        self._open[key] = _Progress(call, call.arrived_s)

    def produced(self, key: Hashable, tokens: int, now_s: float) -> bool:
        """A call has `tokens` more output tokens. Returns whether they are its first."""
        progress = self._open.get(key)
        if progress is None or not tokens:
            return False
        are_first = not progress.tokens
        if are_first:
            progress.first_s = now_s
        progress.tokens += tokens
        progress.last_s = now_s
        return are_first

    def ended(self, key: Hashable, now_s: float) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        progress = self._open.pop(key, None)
        met = progress.met(now_s) if progress is not None else None
        if met is not None:
            self._met.append(met)

    def retain(self, present: Container[Hashable], now_s: float) -> None:
        """All calls have ended except those whose keys are in `present`."""
        for key in [key for key in self._open if key not in present]:
            self.ended(key, now_s)


EARLY_CHANGES = 1_024
"""How many changes are kept for calls that have not arrived yet. The API server first tokenizes a call's prompt."""


class RefinableCalls:
    """An engine's calls whose objectives may change, by the gateway's handle for them.

    A change and its call come on different connections, so the change may arrive first; it is kept for its call. A
    request with several completions (`n`) has one handle for several calls. `key` is the engine's name for a call.
    """

    def __init__(self) -> None:
        self._calls: dict[str, dict[Hashable, LocalCall]] = {}
        self._handles: dict[Hashable, str] = {}
        self._early: OrderedDict[str, EngineAnnotations] = OrderedDict()

    def received(self, key: Hashable, call: LocalCall, handle: str | None) -> None:
        """A call has arrived. A change that arrived before it takes effect now."""
        if handle is None:
            return
        self._calls.setdefault(handle, {})[key] = call
        self._handles[key] = handle
        early = self._early.get(handle)
        if early is not None:
            _refine(call, early)

    def refine(self, changes: Iterable[EngineAnnotations]) -> int:
        """Give calls their new objectives, from the next plan on. Returns how many of the changes found a call."""
        known = 0
        for change in changes:
            assert change.handle is not None
            calls = self._calls.get(change.handle, {})
            for call in calls.values():
                _refine(call, change)
            known += bool(calls)
            if not calls or change.handle in self._early:  # more calls of the handle may still arrive
                self._keep(change.handle, change)
        return known

    def ended(self, key: Hashable) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        handle = self._handles.pop(key, None)
        if handle is not None:
            calls = self._calls[handle]
            del calls[key]
            if not calls:
                del self._calls[handle]
                self._early.pop(handle, None)

    def retain(self, present: Container[Hashable]) -> None:
        """All calls have ended except those whose keys are in `present`."""
        for key in [key for key in self._handles if key not in present]:
            self.ended(key)

    def _keep(self, handle: str, change: EngineAnnotations) -> None:
        self._early[handle] = change
        self._early.move_to_end(handle)
        if len(self._early) > EARLY_CHANGES:
            self._early.popitem(last=False)


def _refine(call: LocalCall, change: EngineAnnotations) -> None:
    call.slo, call.objective = change.slo, change.objective


@dataclass(slots=True, kw_only=True)
class StateReporter:
    """Records one engine's calls and reports on the engine. Fields without a line here are `CacheState`'s."""

    engine: str
    kind: str
    epoch: str
    """A new one at each start of the engine."""
    model: str
    block_tokens: int
    policy: str
    """The local scheduler's name; `engine` if the engine schedules by itself."""
    journal: CacheJournal
    """The tree blocks on the accelerator."""
    takes_objectives: bool = False
    slots: int = 0
    tier: Tier = "chunks"
    lower: Sequence[TierJournal] = ()
    """The tiers below the accelerator, the fastest first. They share the changes of `journal`."""
    ends: EngineEnds[Any] | None = None
    """Where hits can end, if not after each block. Shares the changes of `journal`."""
    untold: str = ""
    tokenizer: TokenizerFingerprint | None = None
    """For the embedded engine. In vLLM and SGLang, the API server adds it to each report."""
    iterations: Iterations = field(default_factory=Iterations)
    """The driver records iterations here."""
    attainment: Attainment = field(default_factory=Attainment)
    refinable: RefinableCalls = field(default_factory=RefinableCalls)
    calls: CallsJournal = field(init=False)

    def __post_init__(self) -> None:
        lower = [one.journal.stored for one in self.lower]
        self.calls = CallsJournal(self.journal, TREE_BLOCK_TOKENS, lower)

    # The engine's calls. `key` is its name for one.

    def received(
        self,
        key: Hashable,
        call: LocalCall,
        handle: str | None,
        gateway: str | None,
        tree_blocks: Callable[[], Sequence[int]],
    ) -> None:
        """A call has arrived, from a `gateway` (None: not known). `tree_blocks` hashes its prompt's tree blocks."""
        self.attainment.received(key, call)
        self.refinable.received(key, call, handle)
        is_urgent = call.slo is not None and call.slo.ttft_s is not None
        self.calls.arrived(key, gateway, call.prompt_tokens, tree_blocks, is_urgent=is_urgent, is_line=call.is_line)

    def produced(self, key: Hashable, tokens: int, now_s: float) -> None:
        """A call has `tokens` more output tokens."""
        if self.attainment.produced(key, tokens, now_s):
            self.calls.computed(key)

    def ended(self, key: Hashable, now_s: float) -> None:
        """A call has finished or was aborted. No effect if it had ended before."""
        self.attainment.ended(key, now_s)
        self.refinable.ended(key)
        self.calls.ended(key)

    def retain(self, present: Container[Hashable], now_s: float) -> None:
        """All calls have ended except those whose keys are in `present`."""
        self.attainment.retain(present, now_s)
        self.refinable.retain(present)
        self.calls.retain(present)

    # Reports.

    def has_news(self, since: int, epoch: str | None, gateway: str | None) -> bool:
        """Whether a report since a cursor of `epoch` would have a change for the `gateway` that asks."""
        if self.ends is not None:
            self.ends.settle()
        return epoch not in {None, self.epoch} or self.calls.has_news(since, gateway)

    def report(
        self,
        since: int | None,
        epoch: str | None,
        *,
        kv: KvState,
        waiting_prompts: Sequence[int],
        running: int,
        budget_tokens: int,
        preemptions: int,
        gateway: str | None = None,
    ) -> CacheState:
        """The cache-state report since a cursor of `epoch` (None: the current one). Another epoch gets a snapshot.

        `waiting_prompts` has the prompt length in tokens of each waiting call. The report leaves out the calls of the
        `gateway` that asks.
        """
        if self.ends is not None:
            self.ends.settle()
        cursor = since if epoch in {None, self.epoch} else None
        snapshot, stored, removed = self.journal.since(cursor)
        calls, ended = self.calls.since(None if snapshot else since, gateway)
        return CacheState(
            engine=self.engine,
            kind=self.kind,
            epoch=self.epoch,
            cursor=self.journal.cursor,
            model=self.model,
            block_tokens=self.block_tokens,
            granularity_tokens=TREE_BLOCK_TOKENS,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            kv=kv,
            queue=QueueState(len(waiting_prompts), running, sum(waiting_prompts), self.iterations.mean_queue_s),
            iteration=self.iterations.state(budget_tokens),
            scheduler=self._scheduler_state(preemptions),
            tokenizer=self.tokenizer,
            calls=calls,
            ended=ended,
            tiers=[one.since(cursor) for one in self.lower],
            ends=None if self.ends is None else self.ends.since(None if snapshot else cursor, self.journal.stored),
            untold=self.untold,
        )

    def _scheduler_state(self, preemptions: int) -> SchedulerState:
        share = self.attainment.share
        return SchedulerState(self.policy, share, preemptions, self.takes_objectives, self.slots, self.tier)
