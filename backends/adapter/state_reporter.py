"""Makes an engine's cache-state reports from its fixed facts and its current state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.backends.adapter.attainment import Attainment
from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.iterations import Iterations
from plait.backends.adapter.refinable_calls import RefinableCalls
from plait.backends.protocol.cache_state import CacheState, EngineKind, KvState, QueueState, SchedulerState
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReporter:
    """Reports on one engine. Each start of the engine has a new `epoch`.

    `engine` is the engine's name, `policy` the name of its local scheduler. `takes_objectives` says whether the
    engine's driver feeds `refinable`, whose objectives may change. It feeds `iterations` and `attainment` in any case.
    `tokenizer` is for an engine whose API server does not add it. The other fields are as in the report.
    """

    engine: str
    kind: EngineKind
    epoch: str
    model: str
    block_tokens: int
    granularity_tokens: int
    policy: str
    journal: CacheJournal
    takes_objectives: bool = False
    slots: int = 0
    tokenizer: TokenizerFingerprint | None = None
    iterations: Iterations = field(default_factory=Iterations)
    attainment: Attainment = field(default_factory=Attainment)
    refinable: RefinableCalls = field(default_factory=RefinableCalls)

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
    ) -> CacheState:
        """The cache-state report since a cursor of `epoch` (None: the current one). Another epoch gets a snapshot.

        `waiting_prompts` are the lengths of the waiting calls' prompts, in tokens.
        """
        snapshot, stored, removed = self.journal.since(since if epoch in {None, self.epoch} else None)
        return CacheState(
            engine=self.engine,
            kind=self.kind,
            epoch=self.epoch,
            cursor=self.journal.cursor,
            model=self.model,
            block_tokens=self.block_tokens,
            granularity_tokens=self.granularity_tokens,
            snapshot=snapshot,
            stored=stored,
            removed=removed,
            kv=kv,
            queue=QueueState(
                waiting=len(waiting_prompts),
                running=running,
                waiting_tokens=sum(waiting_prompts),
                mean_queue_s=self.iterations.mean_queue_s,
            ),
            iteration=self.iterations.state(budget_tokens),
            scheduler=SchedulerState(
                self.policy, self.attainment.share, preemptions, self.takes_objectives, self.slots
            ),
            tokenizer=self.tokenizer,
        )
