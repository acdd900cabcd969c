"""The simulator: the real router and the real engine cores in virtual time.

Nothing is modelled twice: placement, prefix tree, reports, block cache, iteration loop and cost model are the ones that
serve. Only the clock (a heap of events), the network (none) and the polling of cache states (every
`report_interval_s`) stand in for the asyncio shell. The same inputs give the same result.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from backends.embedded.engine import Engine, EngineCall, Output
from gateway.router import Booking, CallUsage, Router
from policy.block_hash import HashChain
from policy.types import Call, PlacementReason

REPORT_INTERVAL_S = 0.05
"""A long poll answers as soon as something changed; 50 ms stand for the answer's way and the gateway's turn."""

AGE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt, ready to be called many times: its chains are copied, never changed."""

    tokens: int
    chain: HashChain
    tree_chain: HashChain


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call of a workload; it generates exactly `output_tokens`."""

    arrives_s: float
    prompt: Prompt
    output_tokens: int
    prefix: str = ""


@dataclass(slots=True)
class CallRecord:
    """What became of a call; times in seconds since the start, `cached_tokens` as the engine reported it."""

    prefix: str
    engine_id: str
    reason: PlacementReason
    prompt_tokens: int
    output_tokens: int
    predicted_cached_tokens: int
    arrived_s: float
    cached_tokens: int = 0
    first_token_s: float = 0.0
    finished_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        return self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return self.finished_s - self.arrived_s

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


Event = Callable[[float], None]


class Simulation:
    """A fleet in virtual time. `engines` by id; the router must know the same ids and none other."""

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine],
        model: str,
        *,
        report_interval_s: float = REPORT_INTERVAL_S,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.records: list[CallRecord] = []
        self._router = router
        self._engines = engines
        self._model = model
        self._report_interval_s = report_interval_s
        self._progress = progress or (lambda _finished: None)
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()
        self._in_engine: dict[EngineCall, tuple[Booking, CallRecord]] = {}
        self._unfinished = 0
        for engine_id in engines:
            router.engine_answered(engine_id, {model: None})

    def run(self, calls: Sequence[SimulatedCall]) -> list[CallRecord]:
        """Send `calls`, run until the last has ended, and return their records in the order of `calls`."""
        self._unfinished = len(calls)
        for call in calls:
            self._at(call.arrives_s, partial(self._arrive, call))
        for engine_id in self._engines:
            self._at(0.0, partial(self._poll, engine_id))
        self._at(0.0, self._age)
        while self._unfinished:
            self.now_s, _, event = heapq.heappop(self._events)
            event(self.now_s)
        return self.records

    def _at(self, when_s: float, event: Event) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _arrive(self, simulated: SimulatedCall, now_s: float) -> None:
        prompt, router, number = simulated.prompt, self._router, len(self.records)
        call = Call(f"call-{number}", self._model, prompt.tokens, router.block_tokens, prompt.tree_chain.hashes)
        placement = router.select(call)
        booking = router.book(call, placement, now_s)
        record = CallRecord(
            prefix=simulated.prefix,
            engine_id=placement.engine_id,
            reason=placement.reason,
            prompt_tokens=prompt.tokens,
            output_tokens=simulated.output_tokens,
            predicted_cached_tokens=placement.cached_tokens,
            arrived_s=now_s,
        )
        self.records.append(record)
        engine, engine_call = self._engines[placement.engine_id], _engine_call(call.call_id, simulated, number, now_s)
        self._in_engine[engine_call] = (booking, record)
        engine.add(engine_call)
        if engine.idle:
            self._step(engine, now_s)

    def _step(self, engine: Engine, now_s: float) -> None:
        step = engine.step(now_s)
        for output in step.outputs:
            self._deliver(output, now_s)
        if step.ends_s is not None:
            self._at(step.ends_s, partial(self._step, engine))

    def _deliver(self, output: Output, now_s: float) -> None:
        booking, record = self._in_engine[output.call]
        if output.call.output_tokens == 1:
            record.first_token_s = now_s
            self._router.first_token(booking, now_s)
        if output.finished:
            record.finished_s = now_s
            record.cached_tokens = output.call.cached_tokens or 0
            usage = CallUsage(record.prompt_tokens, record.output_tokens, record.cached_tokens)
            self._router.settle(booking, usage, now_s)
            del self._in_engine[output.call]
            self._unfinished -= 1
            self._progress(len(self.records) - self._unfinished)

    def _poll(self, engine_id: str, now_s: float) -> None:
        cursor = self._router.engines[engine_id].cursor
        self._router.report(engine_id, self._engines[engine_id].cache_state(cursor), requested_s=now_s)
        self._at(now_s + self._report_interval_s, partial(self._poll, engine_id))

    def _age(self, now_s: float) -> None:
        self._router.age(now_s)
        self._at(now_s + AGE_INTERVAL_S, self._age)


def _engine_call(name: str, simulated: SimulatedCall, number: int, now_s: float) -> EngineCall:
    """Every call generates tokens of its own, so that outputs fill the cache but never match."""
    prompt = simulated.prompt
    chain = prompt.chain.copy()
    return EngineCall(
        name,
        now_s,
        prompt.tokens,
        chain=chain,
        tree_chain=chain if prompt.tree_chain is prompt.chain else prompt.tree_chain.copy(),
        max_output_tokens=simulated.output_tokens,
        output=count(number << 12),
    )
