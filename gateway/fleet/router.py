"""The router: the only owner of mutable scheduling state. It selects an engine for each call and books the call there.

A synchronous core: each event carries its time (`now_s`, any monotonic clock). Nothing here waits or does I/O, so the
state cannot change between `select` and `book`. The gateway drives it from asyncio, the simulator in virtual time.

In: the steps of calls (`select`, `book`, `send`, `first_token`), reports and counts of engines, and probes and failures
(`health`). Out: placements, changes of health, and `on_room` for lines. `select` changes nothing. Exactly one `settle`,
`release` or `fail` ends each `book`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf
from uuid import uuid4

from plait.backends.errors import ConflictError, NoEngineError
from plait.backends.protocol.cache_state import CacheState
from plait.backends.protocol.engine_counts import NO_SIZES, EngineCounts, EngineSizes
from plait.gateway.fleet.booking import DEFAULT_HANG_S, Booking, CallUsage, Failure, Progress
from plait.gateway.fleet.comparisons import Comparisons
from plait.gateway.fleet.engine import FleetEngine, StockKind
from plait.gateway.fleet.engine_cache import EngineCache, EstimatedAnswers
from plait.gateway.fleet.fleet_health import FleetHealth, Jitter
from plait.gateway.fleet.health import Health, HealthChange, HealthState
from plait.gateway.fleet.others_calls import OthersCalls
from plait.gateway.fleet.served_models import ModelNames, ServedModels
from plait.gateway.fleet.tokenizer_agreement import AGREED, Agreement
from plait.policy.costs.cost_model import CostModel
from plait.policy.costs.engine_view import EngineView
from plait.policy.costs.group_outputs import GroupOutputs
from plait.policy.costs.load import DEFAULT_PRIOR_OUTPUT_TOKENS, DEFAULT_WINDOW_S, LoadLedger
from plait.policy.costs.pace import EnginePace, FleetPace
from plait.policy.costs.situation import NONE_OVERTAKEN, Demand, Overtaken
from plait.policy.placement.hand_over import HandOver
from plait.policy.placement.policies import POLICIES, Policy, continued
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS
from plait.policy.prefix.prefix_tree import PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.types import Call, Compared, Placement

Route = str | None
"""The HTTP path that a call needs; None: one that every engine has."""

_NO_NAMES = ModelNames()


class EngineBusyError(ConflictError):
    """An engine cannot be removed yet: it takes calls, or has unfinished ones."""

    default_code = "engine_busy"

    def __init__(self, engine_id: str, calls: int, *, is_draining: bool) -> None:
        state = f"is draining and has {calls} running calls" if is_draining else "takes calls"
        super().__init__(f"Engine '{engine_id}' {state}: drain it and wait until it has no calls, or use force=true.")


class Router:
    """Places the calls of one fleet. `policy` is a policy, or a name in `plait.policy.placement.policies.POLICIES`.

    `addresses` has the engines of each address, its data-parallel ranks in their order, without those that leave.
    `names` are the operator's model names, `jitter` varies the pauses before probes, and `wall_s` is the time since
    1970, for display. Admission sets `waiting`, the number of calls in lines. While there are any, `on_room` is called
    with each engine that may have room.
    """

    def __init__(
        self,
        policy: str | Policy = "plait",
        *,
        block_tokens: int = TREE_BLOCK_TOKENS,
        window_s: float = DEFAULT_WINDOW_S,
        prior_output_tokens: float = DEFAULT_PRIOR_OUTPUT_TOKENS,
        names: ModelNames = _NO_NAMES,
        jitter: Jitter = lambda: 0.0,
        wall_s: Callable[[], float] = lambda: 0.0,
        gateway_id: str = "",
    ) -> None:
        self.gateway_id = gateway_id or uuid4().hex
        self.block_tokens = block_tokens
        self.tree = PrefixTree()
        self.engines: dict[str, FleetEngine] = {}
        self.addresses: dict[str, list[FleetEngine]] = {}
        self.models = ServedModels(self.engines, names)
        self.answers = EstimatedAnswers(lambda engine_id: self.engines[engine_id].cache, self.tree, block_tokens)
        self.health = FleetHealth(
            self.engines, self.addresses, self.models, self.models.refresh, jitter=jitter, wall_s=wall_s
        )
        self.comparisons = Comparisons(self.engines, self.addresses)
        self.on_room: Callable[[str], None] = lambda _engine_id: None
        self.waiting = 0
        self.policy = POLICIES[policy] if isinstance(policy, str) else policy
        self._fleet_pace = FleetPace()
        self._cost_models: dict[CostModel, CostModel] = {}
        self.demand = Demand(window_s, prior_output_tokens)
        self.group_outputs = GroupOutputs(prior_output_tokens)
        self.retries = RetryBudgets(self.demand.active)
        self.hand_over = HandOver()
        self._new_ledger = partial(LoadLedger, window_s=window_s, prior_output_tokens=prior_output_tokens)

    # A call's way through the fleet.

    def select(
        self,
        call: Call,
        now_s: float,
        *,
        prefer: str | None = None,
        avoid: Collection[str] = (),
        shun: Collection[str] = (),
        unable: Collection[str] = (),
        route: str | None = None,
        overtaken: Overtaken = NONE_OVERTAKEN,
        compares_all: bool = False,
    ) -> Placement:
        """Choose an engine that has `route` and a long enough context. Raises `NotFoundError` or `NoEngineError`.

        `prefer` is the engine of the call that this one continues, and is chosen if it is eligible. An engine in
        `avoid` is chosen only if there is no other, one in `shun` if all others are in `avoid`, one in `unable` never.
        `overtaken` and `compares_all` are as in
        `Situation`.
        """
        assert call.block_tokens == self.block_tokens
        engines: Sequence[EngineView] = self.models.takers.get(call.model, ())
        if unable:
            engines = self.models.others(call.model, unable, route)
            if not engines:
                raise NoEngineError(f"No other engine takes calls for '{call.model}'.", retry_after_s=1.0)
        elif route is not None or not engines:
            engines = self.models.eligible(call.model, route)
        if call.model in self.models.uneven:
            engines = self.models.fitting(call, engines, route, unable)
        if avoid:
            engines = [engine for engine in engines if engine.engine_id not in avoid] or engines
            engines = [engine for engine in engines if engine.engine_id not in shun] or engines
        path = self.tree.match(call.block_hashes)
        whole = situation = self.demand.situation(call, path, engines, now_s, overtaken, compares_all=compares_all)
        if self.hand_over.leaving:
            situation = self.hand_over.narrow(call, situation)
        there = None if prefer is None or prefer in avoid else continued(prefer, call, situation)
        placement = there or self.policy.place(call, situation)
        is_handed_over = there is None and situation is not whole
        if placement.compared is not None and not is_handed_over:
            return placement
        return _with_rule(placement, "hand_over" if is_handed_over else self.policy.name)

    def book(self, call: Call, placement: Placement, now_s: float, *, waits: bool = False, tenant: str = "") -> Booking:
        """Record a placement: the engine's expected blocks and work. A call that `waits` is sent later, by `send`."""
        if self.hand_over.leaving:
            self.hand_over.placed(call, self.tree, placement, now_s)
        engine = self.engines[placement.engine_id]
        booking = engine.book(call, placement, self.tree, now_s, waits=waits, tenant=tenant)
        if engine.health.state is HealthState.PROBATION:
            self.health.booked(engine, booking)
        self.demand.placed(call, now_s)
        return booking

    def send(self, booking: Booking, now_s: float) -> None:
        """The engine is sent the call."""
        self.engines[booking.placement.engine_id].send(booking, now_s)

    def refine(self, booking: Booking, call: Call, now_s: float) -> None:
        """The objectives of a booked call have changed. The call stays on its engine."""
        self.demand.refined(booking.call, call)
        self.engines[booking.placement.engine_id].refine(booking, call, now_s)

    def first_token(self, booking: Booking, now_s: float) -> None:
        """The first byte of the answer arrived, so the prompt has been computed."""
        self.engines[booking.placement.engine_id].first_token(booking, now_s)
        if self.waiting:
            self.on_room(booking.placement.engine_id)

    def settle(self, booking: Booking, usage: CallUsage | None, now_s: float) -> HealthChange | None:
        """The call got its whole answer. The engine's token counts (`usage`), if any, replace the predicted ones."""
        engine = self.engines[booking.placement.engine_id]
        before = engine.health.state
        engine.settle(booking, usage, now_s)
        if usage is not None and booking.call.group is not None:
            self.group_outputs.ended(self.models.target(booking.call.model), usage.output_tokens)
        self._left(booking, now_s, None if usage is None else usage.output_tokens)
        return None if engine.health.state is before else self.health.recovered(engine, before)

    def release(self, booking: Booking, now_s: float, *, delivered: bool, refused: bool = False) -> None:
        """The call ended, and its engine is not at fault: the call was aborted, or never reached it (not `delivered`).

        The booking of an undelivered call is undone, unless the engine `refused` it and the call before, too.
        """
        self.engines[booking.placement.engine_id].release(booking, now_s, delivered=delivered, refused=refused)
        self._left(booking, now_s)

    def fail(self, booking: Booking, failure: Failure | None, now_s: float) -> HealthChange | None:
        """The engine failed the call. The call's cost stays in the window, and the engine may be ejected.

        `failure` is None if the gateway aborted the call because the engine is out: its health counts that already.
        """
        engine = self.engines[booking.placement.engine_id]
        engine.fail(booking, now_s)
        self._left(booking, now_s)
        return None if failure is None else self.health.failed(engine, booking, failure, now_s)

    # The fleet.

    def add_engine(
        self,
        engine_id: str,
        cost_model: CostModel,
        *,
        kv_tokens: int | None = None,
        profile_kv_tokens: int | None = None,
        assumed_kv_tokens: int | None = None,
        host_kv_tokens: int | None = None,
        health: Health | None = None,
        hang_s: float = DEFAULT_HANG_S,
        address: str | None = None,
        host: str = "",
    ) -> None:
        """Add a new engine in the state untried, as the next rank of an `address` (None: one of its own).

        The ranks of an address share one pace: ranks with experts step together, so one that only decodes seems slow
        while its busy siblings do not.

        While it does not report, its estimated cache has `kv_tokens`, or `profile_kv_tokens` if neither the engine nor
        the configuration gives a size, or else `assumed_kv_tokens`; `host_kv_tokens` more are in host memory. `hang_s`
        is how long a trial of a quiet engine may have no answer.
        """
        cost_model = self._cost_models.setdefault(cost_model, cost_model)  # policies compare cost models by identity
        address = engine_id if address is None else address
        ranks, residency = self.addresses.get(address, []), Residency(engine_id, self.tree)
        pace = ranks[0].view.pace if ranks else EnginePace(self._fleet_pace)
        view = EngineView(engine_id, cost_model, self._new_ledger(cost_model), residency, pace=pace)
        others = OthersCalls(view, self.tree, self.block_tokens, self.gateway_id, partial(self._others_came, engine_id))
        progress = Progress(hang_s)
        cache = EngineCache(
            view, self.block_tokens, kv_tokens, others, self.answers, progress.waiting,
            profile_tokens=profile_kv_tokens, assumed_tokens=assumed_kv_tokens, host_tokens=host_kv_tokens,
        )  # fmt: skip
        since = self.health.wall_s()
        self.engines[engine_id] = engine = FleetEngine(
            view, health or Health(), cache, progress, address, host,
            is_ranked=address != engine_id, health_since=since,
        )  # fmt: skip
        if ranks:  # a rank refuses what the others refuse
            engine.refused_fields = ranks[0].refused_fields
        self._use(engine.address, [*ranks, engine])

    def at(self, address: str) -> list[FleetEngine]:
        """The engines of an address, also former ranks that still have calls."""
        return [engine for engine in self.engines.values() if engine.address == address]

    def remove_address(self, address: str) -> list[FleetEngine]:
        """Forget all engines of an address, and return them. Raises `EngineBusyError` as `remove_engine` does."""
        engines = self.at(address)
        for engine in engines:
            _check_idle(engine)
        for engine in engines:
            self.remove_engine(engine.view.engine_id)
        return engines

    def use_ranks(self, address: str, engine_ids: Sequence[str]) -> list[FleetEngine]:
        """From now on these are the ranks of an address. Returns its other engines, which get no new calls."""
        was, ranks = self.addresses[address], [self.engines[engine_id] for engine_id in engine_ids]
        self._use(address, ranks)
        leaving = [engine for engine in was if engine not in ranks]
        for engine in ranks:
            engine.draining = was[0].draining
        for engine in leaving:
            engine.draining = True
        self.models.refresh()
        return leaving

    def remove_engine(self, engine_id: str) -> None:
        """Forget an engine, with its part of the prefix tree.

        Raises `EngineBusyError` and changes nothing if the engine does not drain or still has calls.
        """
        engine = self.engines[engine_id]
        _check_idle(engine)
        self._use(engine.address, [one for one in self.addresses.get(engine.address, ()) if one is not engine])
        engine.age(inf)
        engine.cache.forget()
        engine.view.tiers.use(())
        self.answers.forget(engine_id)
        self.hand_over.end(engine_id)
        del self.engines[engine_id], self.tree.ends[engine_id]
        if all(one.view.pace is not engine.view.pace for one in self.engines.values()):
            engine.view.pace.leave()
        self.models.refresh()

    def report(
        self,
        engine_id: str,
        state: CacheState,
        requested_s: float,
        agreement: Agreement = AGREED,
        *,
        now_s: float | None = None,
    ) -> None:
        """Apply a report that was requested at `requested_s` and arrived at `now_s` (None: at once).

        Raises ValueError for an invalid report; then the cache is estimated.
        """
        engine = self.engines[engine_id]
        rendered = engine.cache.kind, engine.cache.agreement
        engine.report(state, requested_s, agreement, requested_s if now_s is None else now_s)
        if rendered != (state.kind, agreement):
            self.models.refresh()
        if self.waiting:
            self.on_room(engine_id)

    def no_reports(self, engine_id: str, problem: str | None = None, *, is_new: bool = False) -> None:
        """The engine has no usable cache-state report: estimate its cache from the calls placed there.

        `problem` is the reason if the engine has our plugin. `is_new`: the engine has restarted, and may report again.
        """
        if is_new:
            self.engines[engine_id].cache.forget()
            self.answers.forget(engine_id)
        else:
            self.engines[engine_id].cache.no_reports(problem)

    def counted(self, engine_id: str, counts: EngineCounts | None, asked_s: float) -> None:
        """An engine without reports has counted its calls after `asked_s`; None: it gives no counts.

        Counts of an engine that reports are ignored, because its reports say more.
        """
        engine = self.engines[engine_id]
        if engine.cache.kind is None and (counts is not None or engine.counts is not None):
            engine.counted(counts, asked_s)
            self.on_room(engine_id)

    def recognised(self, address: str, kind: str | None, sizes: EngineSizes = NO_SIZES) -> None:
        """An address without an adapter was recognised as this kind (None: no longer), with the sizes that it gives.

        The next probe takes over the contexts.
        """
        ranks = self.addresses[address]
        has_reported = any(engine.cache.kind is not None for engine in ranks)
        if kind is not None and has_reported:
            return
        before = ranks[0].kind
        for engine in ranks:
            engine.recognised(None if kind is None else StockKind(kind, sizes))
        if ranks[0].kind != before:
            self.models.refresh()

    def age(self, now_s: float) -> None:
        """Called about once a second: drop placements older than the window, and run the policy's periodic work."""
        for engine in self.engines.values():
            engine.age(now_s)
        self.comparisons.estimates()
        self.policy.age(self.tree, self.models.peers, now_s)

    def neighbours(self, engine_id: str) -> set[str]:
        """The engines on the host of this one, which go down with it."""
        here = self.engines.get(engine_id)
        return set() if here is None else {name for name, one in self.engines.items() if one.host == here.host}

    def predicted_s(
        self, model: str, prompt_tokens: int, output_tokens: int | None, *, in_group: bool = False
    ) -> float:
        """Seconds that a call takes alone on an engine of the model with no part of its prompt cached.

        `output_tokens` is its output limit (None: no limit). With `in_group`, its expected output is that of task
        groups' calls. 0 if no engine serves the model.
        """
        served = self.models.target(model)
        for engine in self.engines.values():
            if served in engine.offer.models:
                costs, expected_tokens = engine.view.cost_model, engine.view.ledger.mean_output_tokens
                if in_group:
                    expected_tokens = self.group_outputs.expected_tokens(served, output_tokens)
                elif output_tokens is not None:
                    expected_tokens = min(output_tokens, expected_tokens)
                return costs.prefill_time_s(prompt_tokens) + costs.decode_time_s(expected_tokens, prompt_tokens)
        return 0.0

    def _use(self, address: str, ranks: list[FleetEngine]) -> None:
        """From now on these are an address's ranks."""
        for rank in ranks:
            rank.view.siblings = [other.view for other in ranks if other is not rank]
        if ranks:
            self.addresses[address] = ranks
        else:
            self.addresses.pop(address, None)

    def _others_came(self, engine_id: str, prompt_tokens: int, now_s: float) -> None:
        """An engine reported a call that this gateway has not sent."""
        engine = self.engines[engine_id]
        if engine.same_as is None:  # otherwise the same process reports the call under its other address, too
            self.demand.others_came(engine.offer.models, prompt_tokens, now_s)

    def _left(self, booking: Booking, now_s: float, output_tokens: int | None = None) -> None:
        """The call has left its engine: update demand, lines and trials."""
        self.demand.left(booking.call, now_s, output_tokens)
        if self.waiting:
            self.on_room(booking.placement.engine_id)
        if self.health.trials:
            self.health.left(booking)


def _check_idle(engine: FleetEngine) -> None:
    if not engine.draining or engine.view.outstanding:
        raise EngineBusyError(engine.view.engine_id, engine.view.outstanding, is_draining=engine.draining)


def _with_rule(placement: Placement, rule: str) -> Placement:
    return placement._replace(compared=(placement.compared or Compared(rule))._replace(rule=rule))


ACTIVE_SHARE = 0.2
LEAST_RETRIES = 3
"""Envoy's defaults. Envoy keeps a retry budget for each cluster, which is a model here."""


class RetryBudgets:
    """Bounds retries to a share of a model's `active` calls, so that retries do not overload a sick fleet."""

    def __init__(self, active: Mapping[str, int]) -> None:
        self._active = active
        self._retrying: Counter[str] = Counter()

    def take(self, model: str) -> bool:
        """Take a retry for a call that has just left its engine, until `give_back`; False if none is left."""
        if self._retrying[model] >= max(LEAST_RETRIES, ACTIVE_SHARE * (self._active.get(model, 0) + 1)):
            return False
        self._retrying[model] += 1
        return True

    def give_back(self, model: str) -> None:
        """A retry has ended."""
        assert self._retrying[model] > 0
        self._retrying[model] -= 1
