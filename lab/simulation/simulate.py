"""The simulator: the real router, admission and engine cores in virtual time.

Nothing is modelled twice: placement, admission, prefix tree, reports, block cache, iteration loop and cost model are
the real ones. Only the asyncio shell is replaced: a heap of events is the clock, and there is no network. The simulator
polls each engine's cache state every `report_interval_s`. A caller that runs programs of calls adds its own events
(`at`) and sends calls when they are ready (`send`). The same inputs give the same result.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import inf

from plait.backends.protocol.cache_state import CacheState
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.backlog import Waiting
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.admission.shares import REGULAR_S, fair_parts, needs_of_sessions, part_of_engines
from plait.gateway.admission.tenants import UNLIMITED
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.router import Router
from plait.gateway.timed_events import Event
from plait.lab.embedded.call import EmbeddedCall, Output
from plait.lab.embedded.engine import Engine
from plait.lab.embedded.hash_chain import HashChain
from plait.lab.embedded.lockstep import Lockstep
from plait.lab.embedded.ranks import Ranks
from plait.policy.sessions.session_gate import CHAT_TOKENS
from plait.policy.types import Call, Objective, PlacementReason, Slo, TaskGroup

REPORT_INTERVAL_S = 0.05
"""A real long poll answers at once when the cache changes. 50 ms stand for the network and the gateway's own work."""

AGE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt that many calls may share: its chains are copied, never changed."""

    tokens: int
    chain: HashChain
    tree_chain: HashChain
    ids: Sequence[int] = ()
    """The tokens, if they are kept: hits that end inside tree blocks need them."""


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One call of a workload. Fields without a description are as in `Call`."""

    arrives_s: float
    prompt: Prompt
    output_tokens: int
    """The call generates exactly this many."""
    prefix: str = ""
    """The name of the shared prefix, for reports."""
    slo: Slo | None = None
    objective: Objective | None = None
    group: TaskGroup | None = None
    output_limit: int | None = None
    first_output_id: int | None = None
    """The token ids of the output ascend from here; None: the ids are unique, so that the output is cached but never
    matches.
    """
    tenant: str = ""
    session: str = ""
    priority: int = 0
    is_line: bool = False


@dataclass(slots=True)
class CallRecord:
    """A call's result. Times are in seconds since the start."""

    prefix: str
    prompt_tokens: int
    output_tokens: int
    arrived_s: float
    tenant: str = ""
    engine_id: str = ""
    """Empty until the call is sent."""
    reason: str = PlacementReason.EXPLORE
    predicted_cached_tokens: int = 0
    predicted_loaded_tokens: int = 0
    sent_s: float = 0.0
    cached_tokens: int = 0
    """The engine's own count."""
    loaded_tokens: int = 0
    """The part of `cached_tokens` from lower tiers."""
    first_token_s: float = 0.0
    finished_s: float = 0.0
    admitted_s: float = 0.0
    """When the engine began to compute the call."""
    retry_after_s: float = 0.0
    """The Retry-After of a call that was refused, at `finished_s`."""

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.arrived_s

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


Ended = Callable[[CallRecord], None]
"""Called with the record of an ended call, at its `finished_s`."""


@dataclass(frozen=True, slots=True)
class _Gateway:
    router: Router
    admission: Admission


@dataclass(slots=True)
class _Sent:
    """A call in a gateway or an engine."""

    gateway: _Gateway
    waiting: Waiting
    record: CallRecord
    on_ended: Ended
    on_refused: Ended


class Simulation:
    """A fleet in virtual time. The router must have exactly the `engines`, which are by id.

    A server of data-parallel ranks is one engine for each, or one `Ranks`: gateways then know only its address,
    get no reports of it, and the server chooses the rank of a call. Each of `lockstep` has ranks that step together.

    Each of the `more` routers is another gateway with the same engines. Calls go to the gateways in turn, all calls of
    a session to one of them. The gateways share the engines' KV for sessions as with one store. Reports reach them
    `report_delay_s` late. With `ends_by_reports`, so do first tokens and ends of a gateway's own calls, as with a
    router that does not see the answers.

    `ahead_s`, `max_wait_s` and `chat_tokens` are as in `Admission`; `chat_tokens` None: sessions are held if the policy
    keeps them, as in the gateway. `refused` has the records of refused calls.
    """

    def __init__(
        self,
        router: Router,
        engines: Mapping[str, Engine | Ranks],
        model: str,
        *,
        lockstep: Sequence[Lockstep] = (),
        more: Sequence[Router] = (),
        report_interval_s: float = REPORT_INTERVAL_S,
        report_delay_s: float = 0.0,
        ends_by_reports: bool = False,
        ahead_s: float = AHEAD_S,
        max_wait_s: float = inf,
        chat_tokens: float | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.now_s = 0.0
        self.records: list[CallRecord] = []
        self.refused: list[CallRecord] = []
        chat_tokens = (CHAT_TOKENS if router.policy.keeps_sessions else inf) if chat_tokens is None else chat_tokens
        routers = (router, *more)
        self._new_admission = partial(Admission, max_wait_s=max_wait_s, ahead_s=ahead_s, chat_tokens=chat_tokens)
        self._owners: dict[str, _Gateway] = {}
        self._engines = engines
        self._together = {engine: one for one in lockstep for engine in one.engines}
        self._model = model
        self._report_interval_s = report_interval_s
        self._report_delay_s = report_delay_s
        self._ends_by_reports = ends_by_reports
        self._unheard: dict[tuple[Router, str], list[Event]] = defaultdict(list)
        self._progress = progress or (lambda _finished: None)
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()
        self._waiting = self._finished = 0
        self._in_engine: dict[EmbeddedCall, _Sent] = {}
        self._from_others: dict[EmbeddedCall, Callable[[object], None]] = {}  # with what follows each
        self._not_admitted: dict[Engine | Lockstep, list[EmbeddedCall]] = defaultdict(list)
        self._next_step_s: dict[Engine | Lockstep, float] = {}
        self._to_come = 0  # events that must happen before the run ends
        self._gateways = [self._new_gateway(one) for one in routers]
        self._parts: dict[_Gateway, dict[str, int]] = {}
        for gateway in self._gateways if more else ():
            gateway.admission.sessions.part = partial(self._part, gateway)

    @property
    def admissions(self) -> list[Admission]:
        return [gateway.admission for gateway in self._gateways]

    def run(self, calls: Sequence[SimulatedCall] = ()) -> list[CallRecord]:
        """Send `calls` and run until no events are left; returns the records of all calls, in the order of sending."""
        for call in calls:
            self.at(call.arrives_s, partial(self._arrive, call))
        for gateway in self._gateways:
            self._begin(gateway)
        if len(self._gateways) > 1:
            self._schedule(0.0, self._share)
        while self._to_come or self._in_engine or self._waiting:
            self.now_s, _, event = heapq.heappop(self._events)
            event(self.now_s)
        return self.records

    def replace(self, router: Router, takes_s: float) -> None:
        """Start a gateway without any knowledge, which polls the engines. It takes all calls from `takes_s` on."""
        gateway = self._new_gateway(router)
        self._begin(gateway)

        def take(_now_s: float) -> None:
            self._gateways = [gateway]
            self._owners.clear()

        self._schedule(takes_s, take)

    def at(self, when_s: float, event: Event) -> None:
        """Schedule `event` at a time that has not passed yet."""
        self._to_come += 1
        self._schedule(when_s, partial(self._come, event))

    def send(
        self, simulated: SimulatedCall, on_ended: Ended, on_refused: Ended | None = None, *, prefer: str | None = None
    ) -> CallRecord:
        """A call arrives now. Its record is complete when `on_ended` or `on_refused` is called. `prefer` is as in
        `Waiting`.
        """
        prompt, number, now_s = simulated.prompt, len(self.records), simulated.arrives_s
        gateway = self._gateways[number % len(self._gateways)]
        if simulated.session:
            gateway = self._owners.setdefault(simulated.session, gateway)
        router = gateway.router
        call = Call(
            f"call-{number}",
            self._model,
            prompt.tokens,
            router.block_tokens,
            prompt.tree_chain.hashes,
            slo=simulated.slo,
            objective=simulated.objective,
            priority=simulated.priority,
            group=simulated.group,
            output_limit=simulated.output_limit,
            session=simulated.session,
            arrived_s=now_s,
            is_line=simulated.is_line,
            tokens=prompt.ids,
        )
        record = CallRecord(simulated.prefix, prompt.tokens, simulated.output_tokens, now_s, simulated.tenant)
        self.records.append(record)
        tokens = prompt.tokens + simulated.output_tokens
        waiting = Waiting(
            simulated.tenant,
            tokens,
            call=call,
            output_tokens=simulated.output_tokens,
            prefer=prefer,
            session=simulated.session,
            passes=simulated.group is not None,
        )
        embedded_call = _embedded_call(call, simulated, number, router.gateway_id)
        sent = _Sent(gateway, waiting, record, on_ended, on_refused or _nobody)
        waiting.tell = partial(self._told, embedded_call, sent)
        self._waiting += 1
        gateway.admission.enter(waiting, now_s)
        if waiting.is_sent:
            waiting.tell()
        return record

    def bypass(self, call: EmbeddedCall, engine_id: str, on_ended: Callable[[object], None]) -> None:
        """Another client of an engine sends it a call now, of which no gateway is told."""
        self._from_others[call] = on_ended
        self._add(call, engine_id)

    def _new_gateway(self, router: Router) -> _Gateway:
        for engine_id in self._engines:
            router.health.answered(engine_id, {self._model: None})
        return _Gateway(router, self._new_admission(router, self._later, lambda _: UNLIMITED))

    def _begin(self, gateway: _Gateway) -> None:
        """Start a gateway's polls of the engines and its periodic work."""
        for engine_id, engine in self._engines.items():
            if isinstance(engine, Engine):
                self._schedule(self.now_s, partial(self._poll, gateway.router, engine_id, engine))
        self._schedule(self.now_s, partial(self._age, gateway.router))

    def _told(self, call: EmbeddedCall, sent: _Sent) -> None:
        self._waiting -= 1
        waiting, record = sent.waiting, sent.record
        if waiting.error is not None:
            record.finished_s, record.retry_after_s = self.now_s, waiting.error.retry_after_s or 0.0
            self.records.remove(record)
            self.refused.append(record)
            sent.on_refused(record)
            return
        assert waiting.booking is not None
        placement = waiting.booking.placement
        record.engine_id, record.reason = placement.engine_id, placement.reason
        record.predicted_cached_tokens, record.sent_s = placement.cached_tokens, self.now_s
        record.predicted_loaded_tokens = sum(tokens for _, tokens in placement.loaded)
        if call.slo is None or not call.slo.has_zero:
            call.arrived_s = self.now_s  # as `engine_annotations` tells it
        self._in_engine[call] = sent
        self._add(call, placement.engine_id)

    def _add(self, call: EmbeddedCall, engine_id: str) -> None:
        engine = self._engines[engine_id]
        if isinstance(engine, Ranks):
            engine = engine.engines[engine.choose()]
        engine.add(call)
        stepped = self._together.get(engine, engine)
        if call in self._in_engine:
            self._not_admitted[stepped].append(call)
        if stepped.idle:
            self._step(stepped, self.now_s)

    def _later(self, when_s: float, event: Event) -> None:
        self._schedule(max(when_s, self.now_s), event)

    def _schedule(self, when_s: float, event: Event) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def _come(self, event: Event, now_s: float) -> None:
        self._to_come -= 1
        event(now_s)

    def _arrive(self, simulated: SimulatedCall, _now_s: float) -> None:
        self.send(simulated, _nobody)

    def _step(self, engine: Engine | Lockstep, now_s: float) -> None:
        step = engine.step(now_s)
        self._note_admitted(engine, now_s)
        if step.ends_s is not None and step.ends_s != self._next_step_s.get(engine):
            self._next_step_s[engine] = step.ends_s
            self._schedule(step.ends_s, partial(self._step, engine))
        for output in step.outputs:
            self._deliver(output, now_s)

    def _note_admitted(self, engine: Engine | Lockstep, now_s: float) -> None:
        waiting = self._not_admitted[engine]
        if any(call.cached_tokens is not None for call in waiting):
            for call in waiting:
                if call.cached_tokens is not None:
                    self._in_engine[call].record.admitted_s = now_s
            waiting[:] = [call for call in waiting if call.cached_tokens is None]

    def _deliver(self, output: Output, now_s: float) -> None:
        if output.call.sent_tokens > 1 and not output.finished:
            return
        if output.call in self._from_others:
            if output.finished:
                self._from_others.pop(output.call)(now_s)
            return
        sent = self._in_engine[output.call]
        record, router = sent.record, sent.gateway.router
        if output.call.sent_tokens == 1:
            record.first_token_s = now_s
            self._tell(sent, partial(router.first_token, _booking(sent)), now_s)
        if output.finished:
            record.finished_s = now_s
            record.cached_tokens = output.call.cached_tokens or 0
            record.loaded_tokens = output.call.loaded_tokens
            self._tell(sent, partial(_leave, sent), now_s)
            del self._in_engine[output.call]
            self._finished += 1
            self._progress(self._finished)
            sent.on_ended(record)

    def _tell(self, sent: _Sent, event: Event, now_s: float) -> None:
        """Give a gateway an event of its call, now or with the engine's next report."""
        if self._ends_by_reports:
            self._unheard[sent.gateway.router, sent.record.engine_id].append(event)
        else:
            event(now_s)

    def _poll(self, router: Router, engine_id: str, engine: Engine, now_s: float) -> None:
        cursor = router.engines[engine_id].cache.cursor
        state = engine.cache_state(cursor, router.gateway_id)
        heard = self._unheard.pop((router, engine_id), [])
        hear = partial(_hear, partial(_report, router, engine_id, state, now_s), heard)
        if self._report_delay_s:
            self._schedule(now_s + self._report_delay_s, hear)
        else:
            hear(now_s)
        next_s = now_s + max(self._report_delay_s, self._report_interval_s)
        self._schedule(next_s, partial(self._poll, router, engine_id, engine))

    def _part(self, gateway: _Gateway, model: str) -> float:
        found = part_of_engines(model, gateway.router, self._parts.get(gateway))
        return 1 / len(self._gateways) if found is None else found

    def _share(self, now_s: float) -> None:
        """Divide the KV for sessions by the gateways' needs, as the shared store does."""
        needs = {one: dict(needs_of_sessions(one.admission, one.router)) for one in self._gateways}
        self._parts = {one: {} for one in needs}
        for name in {name for of_one in needs.values() for name in of_one}:
            those = {one: of_one[name] for one, of_one in needs.items() if name in of_one}
            whole = min(need.whole for need in those.values())
            for one, part in zip(those, fair_parts(whole, [need.wanted for need in those.values()]), strict=True):
                self._parts[one][name] = part
        self._schedule(now_s + REGULAR_S, self._share)

    def _age(self, router: Router, now_s: float) -> None:
        router.age(now_s)
        self._schedule(now_s + AGE_INTERVAL_S, partial(self._age, router))


def _booking(sent: _Sent) -> Booking:
    assert sent.waiting.booking is not None
    return sent.waiting.booking


def _report(router: Router, engine_id: str, state: CacheState, requested_s: float, now_s: float) -> None:
    router.report(engine_id, state, requested_s, now_s=now_s)


def _hear(report: Event, heard: Iterable[Event], now_s: float) -> None:
    """A report arrives, with the first tokens and ends since the report before (`heard`)."""
    report(now_s)
    for event in heard:
        event(now_s)


def _leave(sent: _Sent, now_s: float) -> None:
    """Tell the gateway that a call has ended."""
    record = sent.record
    usage = CallUsage(record.prompt_tokens, record.output_tokens, record.cached_tokens)
    sent.gateway.router.settle(_booking(sent), usage, now_s)
    sent.gateway.admission.left(sent.waiting, record.prompt_tokens + record.output_tokens, now_s)


def _nobody(_record: CallRecord) -> None:
    """The `on_ended` of a call of `run`, of which only the record is needed."""


def _embedded_call(call: Call, simulated: SimulatedCall, number: int, gateway: str) -> EmbeddedCall:
    prompt = simulated.prompt
    chain = prompt.chain.copy()
    first_id = number << 12 if simulated.first_output_id is None else simulated.first_output_id
    return EmbeddedCall(
        call.call_id,
        simulated.arrives_s,
        prompt.tokens,
        slo=call.slo,
        objective=call.objective,
        priority=call.priority,
        is_line=call.is_line,
        max_output_tokens=call.output_limit,
        chain=chain,
        tree_chain=chain if prompt.tree_chain is prompt.chain else prompt.tree_chain.copy(),
        final_output_tokens=simulated.output_tokens,
        output=count(first_id),
        gateway=gateway,
        prompt=prompt.ids,
    )
