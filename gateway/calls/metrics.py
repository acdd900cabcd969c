"""Prometheus metrics of calls: tokens, times, outcomes, promises, and parity.

Parity compares the cached tokens that the gateway predicts with those that engines report. The prediction is made from
the gateway's token ids: if an engine tokenizes otherwise, no block ever matches, and placement ignores its cache.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp
from typing import Final, NamedTuple

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from plait.backends.errors import PlaitError
from plait.gateway.calls.call import Attempt, Ending, Outcome
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.reuse_metrics import ReuseCollector
from plait.gateway.fleet.booking import CallUsage
from plait.gateway.metrics import MOST_LABEL_SETS, Buckets, Count, FastCounter, FastHistogram
from plait.policy.types import NO_SLO

MEMORY_S = 300.0
"""The time constant of the decaying sums."""

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TENANT_TTFT_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TENANT_E2E_BUCKETS_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
WAITED_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
FIRST_TOKEN_RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 5, 10)
E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITL_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
TOKENS = {
    "prompt_tokens": "Prompt tokens of ended calls",
    "output_tokens": "Tokens generated",
    "cached_tokens_predicted": "Prompt tokens predicted to be cached, of calls whose engine reported its cached tokens",
    "cached_tokens_reported": "Prompt tokens the engine found cached",
    "cached_tokens_mispredicted": "Sum over calls of the difference between predicted and reported cached tokens",
}

log = structlog.get_logger(__name__)


class _Drift:
    """Decayed sums of one engine's calls for one model."""

    __slots__ = ("_at_s", "_prompt_tokens", "_wrong_tokens")

    def __init__(self) -> None:
        self._prompt_tokens = 0.0
        self._wrong_tokens = 0.0
        self._at_s = 0.0

    def add(self, prompt_tokens: int, wrong_tokens: int, now_s: float) -> None:
        kept = exp((self._at_s - now_s) / MEMORY_S) if self._prompt_tokens else 0.0
        self._prompt_tokens = self._prompt_tokens * kept + prompt_tokens
        self._wrong_tokens = self._wrong_tokens * kept + wrong_tokens
        self._at_s = now_s

    @property
    def share(self) -> float:
        """The wrongly predicted share of the prompt tokens."""
        return self._wrong_tokens / self._prompt_tokens if self._prompt_tokens else 0.0


class Parity(Collector):
    """Compares predicted with reported cached tokens, by model and engine."""

    def __init__(self) -> None:
        self._drifts: dict[tuple[str, str], _Drift] = {}

    def observe(self, model: str, engine_id: str, predicted_tokens: int, usage: CallUsage, now_s: float) -> None:
        """Record a call whose engine reported its cached tokens."""
        assert usage.cached_tokens is not None
        drift = self._drifts.get((model, engine_id))
        if drift is None:
            drift = self._drifts[model, engine_id] = _Drift()
        drift.add(usage.prompt_tokens, abs(predicted_tokens - usage.cached_tokens), now_s)

    def collect(self) -> Iterator[Metric]:
        """The share of prompt tokens whose caching was predicted wrongly over the last minutes."""
        gauge = GaugeMetricFamily(
            "plait_cache_drift",
            "Share of prompt tokens whose caching was predicted wrongly",
            labels=["model", "engine"],
        )
        for (model, engine_id), drift in self._drifts.items():
            gauge.add_metric([model, engine_id], drift.share)
        yield gauge


class _OfEngine(NamedTuple):
    """The metrics of one model on one engine that each call updates: one lookup instead of ten."""

    ok: Count
    ttft: Buckets
    first_token_ratio: Buckets
    tpot: Buckets
    e2e: Buckets
    prompt_tokens: Count
    output_tokens: Count
    predicted: Count
    reported: Count
    mispredicted: Count


class ModelTotals(NamedTuple):
    """A model's counts since the start: tokens, and calls with a promised SLO."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    slo_calls: float = 0.0
    slo_missed: float = 0.0


NO_TOTALS: Final = ModelTotals()


class _OfTenant(NamedTuple):
    """The metrics of a tenant's calls with the same model, status and finish reason, found by one lookup.

    `compared` and `margin_s` count the calls of all tenants for the model.
    """

    label: str
    """The tenant's name for operators."""
    calls: Count
    prompt_tokens: Count
    cached_tokens: Count
    output_tokens: Count
    ttft: Buckets
    e2e: Buckets
    compared: Count
    margin_s: Count


class CallMetrics:
    """Counters and histograms that are updated when attempts and calls end.

    By engine, each attempt counts once, with its `outcome`: `ok`, `refused` (the caller's fault), `failed` (the
    engine's), `defect` (the gateway's) or `client_gone`. By tenant, each call counts once, however many attempts it
    had, and so does a request that was refused before it became a call. `tenant_label` turns a tenant into the name
    that operators see.
    """

    def __init__(self, registry: CollectorRegistry, tenant_label: Callable[[str], str] = str) -> None:
        self.tenant_label = tenant_label

        def counter(name: str, text: str, *labels: str) -> FastCounter:
            registry.register(made := FastCounter(f"plait_{name}", text, labels))
            return made

        def histogram(name: str, text: str, bounds: Sequence[float], *labels: str) -> FastHistogram:
            registry.register(made := FastHistogram(f"plait_{name}", text, labels, bounds))
            return made

        of_engine, of_tenant, ended = ("model", "engine"), ("tenant", "model"), "Arrival to last token"
        self._calls = counter("calls", "Calls by model, engine and outcome", *of_engine, "outcome")
        text = "Placements of calls that left their engines, by reason"
        self._placements = counter("placements", text, *of_engine, "reason")
        self._tokens = [counter(name, text, *of_engine) for name, text in TOKENS.items()]
        self._failures = counter("call_failures", "Calls that the engine failed, by cause", *of_engine, "cause")
        text = "Calls that were tried again after this engine failed or refused them"
        self._retries = counter("retries", text, *of_engine, "cause")
        self._not_retried = counter("retries_refused", "Failed calls that were not tried again", "model", "why")
        self._corrected = counter("usage_corrected", "Answers whose reported usage was out of bounds", *of_engine)
        text = "Requests that the gateway answered with an error, by the route of a call"
        self._refusals = counter("refusals", text, "tenant", "model", "path", "status", "code")

        self._ttft = histogram("ttft_seconds", "Arrival to first token", TTFT_BUCKETS_S, *of_engine)
        text = "Time from placement to first token over what was predicted then"
        self._first_token_ratio = histogram("first_token_ratio", text, FIRST_TOKEN_RATIO_BUCKETS, "engine")
        self._tpot = histogram("tpot_seconds", "Mean time per output token after the first", ITL_BUCKETS_S, *of_engine)
        self._e2e = histogram("e2e_seconds", ended, E2E_BUCKETS_S, *of_engine)
        self.gaps = histogram("itl_seconds", "Time between two pieces of a stream", ITL_BUCKETS_S, *of_engine)
        text = "Time that a call waited in the gateway for this, of those that did"
        self._waited = histogram("waited_seconds", text, WAITED_BUCKETS_S, "model", "why")

        text = "Requests for calls that ended, by the status that the client got and why the answer ended"
        self._tenant_calls = counter("tenant_calls", text, *of_tenant, "status", "finish_reason")
        self._tenant_prompt = counter("tenant_prompt_tokens", "Prompt tokens of answered calls", *of_tenant)
        text = "Prompt tokens of answered calls that the engine found cached"
        self._tenant_cached = counter("tenant_cached_tokens", text, *of_tenant)
        self._tenant_output = counter("tenant_output_tokens", "Tokens generated", *of_tenant)
        self._tenant_ttft = histogram(
            "tenant_ttft_seconds", "Arrival to first token", TENANT_TTFT_BUCKETS_S, *of_tenant
        )
        text = f"{ended}, also of whole answers"
        self._tenant_e2e = histogram("tenant_e2e_seconds", text, TENANT_E2E_BUCKETS_S, *of_tenant)
        of_objective = ("model", "tenant", "objective")
        text = "Calls with this SLO, by whether it was promised or deduced, and whether it was met"
        self._slo = counter("slo_calls", text, *of_objective, "slo", "source", "met")
        text = "Calls that met all that they were promised: the rate is the goodput"
        self._good = counter("good_calls", text, *of_objective)
        self._compared = counter("compared_calls", "Calls whose next best engine is known", "model")
        text = "Sum of what these calls would cost more on their next best engines"
        self._margin_s = counter("margin_seconds", text, "model")

        self.reuse, self._parity = ReuseCollector(), Parity()
        for collector in (self.reuse, self._parity):
            registry.register(collector)
        self._failed = defaultdict[str, int](int)  # by tenant: calls that engines failed
        self._broken = defaultdict[str, int](int)  # by tenant: failed calls whose answer had begun with a good status
        self._by_engine: dict[tuple[str, str], _OfEngine] = {}
        self._by_tenant: dict[tuple[str, str, int, str | None], _OfTenant] = {}

    def retried(self, model: str, engine_id: str, cause: str) -> None:
        """Count the retry of a call that the engine failed, or refused for a `Lack`."""
        self._retries.of[model, engine_id, cause].inc()

    def not_retried(self, model: str, why: str) -> None:
        self._not_retried.of[model, why].inc()

    def left_engine(
        self, attempt: Attempt, outcome: Outcome, cause: str | None, arrived_s: float, now_s: float
    ) -> None:
        """Count an attempt that has ended. `cause` is the error's, if the engine failed it."""
        booking, usage, first_s = attempt.booking, attempt.answer.usage, attempt.booking.first_token_s
        model, engine_id = booking.call.model, booking.placement.engine_id
        self._placements.of[model, engine_id, booking.placement.reason].value += 1
        mine = self._by_engine.get((model, engine_id)) or self._new(model, engine_id)
        if outcome == "ok":
            mine.ok.value += 1
        else:
            self._calls.of[model, engine_id, outcome].value += 1
        if cause is not None:
            self._failures.of[model, engine_id, cause].inc()
        if first_s is not None:
            mine.ttft.observe(first_s - arrived_s)
            predicted_s = booking.placement.first_token_s
            if predicted_s:
                mine.first_token_ratio.observe((first_s - booking.booked_s) / predicted_s)
        if attempt.answer.is_corrected:
            self._corrected.of[model, engine_id].inc()
        if usage is None or outcome != "ok":
            return
        mine.e2e.observe(now_s - arrived_s)
        if first_s is not None and usage.output_tokens > 1:
            mine.tpot.observe((now_s - first_s) / (usage.output_tokens - 1))
        mine.prompt_tokens.value += usage.prompt_tokens
        mine.output_tokens.value += usage.output_tokens
        if usage.cached_tokens is not None:
            predicted = booking.placement.cached_tokens
            mine.predicted.value += predicted
            mine.reported.value += usage.cached_tokens
            mine.mispredicted.value += abs(predicted - usage.cached_tokens)
            self._parity.observe(model, engine_id, predicted, usage, now_s)

    def refused(self, error: PlaitError) -> None:
        """Count an error answer to a request that was no call: on another route, or not parsable."""
        self._refusals.of["", "", "", str(error.status), error.shown_code].value += 1

    def no_call(self, ending: Ending) -> None:
        self._tenant_calls.of[self.tenant_label(ending.tenant), ending.model, str(ending.status), ""].value += 1
        if ending.code is not None:
            self._count_refusal(ending, ending.code)

    def ended(self, delivery: Delivery) -> None:
        attempt, ending = delivery.attempt, delivery.ending
        assert ending is not None
        finish, model, now_s = None if attempt is None else attempt.answer.finish, ending.model, ending.ended_s
        key = (ending.tenant, model, ending.status, finish)
        mine = self._by_tenant.get(key) or self._new_of_tenant(key)
        mine.calls.value += 1
        if ending.code is not None and not ending.is_told:
            self._count_refusal(ending, ending.code)
        if ending.gateway_s or (delivery.entry is not None and delivery.entry.waiting.waits):
            self._count_waits(model, delivery)
        if attempt is None:
            return
        margin = attempt.booking.placement.margin()
        if margin.next_engine is not None and margin.margin_s is not None:
            mine.compared.value += 1
            # Negative if the call's times or its group decided against the cheapest engine. A counter never falls.
            mine.margin_s.value += max(0.0, margin.margin_s)
        booking, usage = attempt.booking, attempt.answer.usage
        is_at_fault = ending.status == 500 and ending.outcome == "refused"  # a request that every engine fails alike
        self._failed[mine.label] += is_at_fault or ending.outcome == "failed"
        self._broken[mine.label] += ending.outcome == "failed" and ending.status < 400
        if ending.outcome in {"ok", "failed", "defect"}:
            met, objective = ending.outcome == "ok", booking.call.objective or ""
            if booking.call.slo is not None and booking.call.judged != NO_SLO:
                met = self._count_slos(delivery, attempt, mine.label, objective, now_s, answered=met)
            self._good.of[model, mine.label, objective].value += met
        if usage is not None:
            mine.prompt_tokens.value += usage.prompt_tokens
            mine.output_tokens.value += usage.output_tokens
            mine.cached_tokens.value += usage.cached_tokens or 0
        if booking.first_token_s is not None:
            mine.ttft.observe(booking.first_token_s - ending.arrived_s)
        if ending.outcome == "ok":
            mine.e2e.observe(now_s - ending.arrived_s)

    def _count_refusal(self, ending: Ending, code: str) -> None:
        tenant = self.tenant_label(ending.tenant)
        self._refusals.of[tenant, ending.model, ending.path, str(ending.status), code].value += 1

    def of_models(self) -> dict[str, ModelTotals]:
        found: dict[str, ModelTotals] = {}
        prompt, reported = (
            self._tokens[list(TOKENS).index(name)] for name in ("prompt_tokens", "cached_tokens_reported")
        )
        for (model, _), count in prompt.of.items():
            known = found.get(model, NO_TOTALS)
            found[model] = known._replace(prompt_tokens=known.prompt_tokens + count.value)
        for (model, _), count in reported.of.items():
            known = found.get(model, NO_TOTALS)
            found[model] = known._replace(cached_tokens=known.cached_tokens + count.value)
        for (model, _, _, _, source, met), count in self._slo.of.items():
            known = found.get(model, NO_TOTALS)
            if source == "promised":
                missed = known.slo_missed + (count.value if met == "no" else 0.0)
                found[model] = known._replace(slo_calls=known.slo_calls + count.value, slo_missed=missed)
        return found

    def of_tenants(self) -> tuple[dict[str, int], dict[str, int]]:
        """By tenant label, since the start: calls that were answered, and calls that engines failed."""
        answered = defaultdict[str, int](int)
        for (tenant, _, status, _), count in self._tenant_calls.of.items():
            if int(status) < 400:
                answered[tenant] += round(count.value)
        for tenant, broken in self._broken.items():
            answered[tenant] -= broken
        return answered, dict(self._failed)

    def tokens_of_tenants(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """By tenant label, since the start: prompt tokens of answered calls, and generated tokens."""
        return _by_tenant(self._tenant_prompt), _by_tenant(self._tenant_output)

    def _count_waits(self, model: str, delivery: Delivery) -> None:
        """Record how long a call waited, for each reason."""
        for why, waited_s in (delivery.waited_for() or {}).items():
            self._waited.of[model, why].observe(waited_s)

    def _count_slos(
        self, delivery: Delivery, attempt: Attempt, tenant: str, objective: str, now_s: float, *, answered: bool
    ) -> bool:
        """Count for each SLO whether it was met. Returns whether the call was answered and met all promised SLOs."""
        booking, kept = attempt.booking, answered
        is_deduced = booking.call.slo is not None and booking.call.slo.is_deduced
        source = "deduced" if is_deduced else "promised"
        for slo, limit_s, taken_s in _times(attempt, delivery.arrived_s, now_s):
            met = answered and taken_s <= limit_s
            kept &= met or is_deduced
            self._slo.of[booking.call.model, tenant, objective, slo, source, "yes" if met else "no"].value += 1
        return kept

    def _new(self, model: str, engine_id: str) -> _OfEngine:
        found = self._by_engine[model, engine_id] = _OfEngine(
            self._calls.of[model, engine_id, "ok"],
            self._ttft.of[model, engine_id],
            self._first_token_ratio.of[(engine_id,)],
            self._tpot.of[model, engine_id],
            self._e2e.of[model, engine_id],
            *(counter.of[model, engine_id] for counter in self._tokens),
        )
        return found

    def _new_of_tenant(self, key: tuple[str, str, int, str | None]) -> _OfTenant:
        tenant, model, status, finish = self.tenant_label(key[0]), *key[1:]
        if len(self._by_tenant) >= MOST_LABEL_SETS:
            self._by_tenant.clear()  # a cache of lookups only: the counts stay in the metrics
        found = self._by_tenant[key] = _OfTenant(
            tenant,
            self._tenant_calls.of[tenant, model, str(status), finish or ""],
            self._tenant_prompt.of[tenant, model],
            self._tenant_cached.of[tenant, model],
            self._tenant_output.of[tenant, model],
            self._tenant_ttft.of[tenant, model],
            self._tenant_e2e.of[tenant, model],
            self._compared.of[(model,)],
            self._margin_s.of[(model,)],
        )
        return found


def _by_tenant(counts: FastCounter) -> Mapping[str, int]:
    """The counts by tenant and model, summed over models."""
    found: dict[str, int] = {}
    for (tenant, _), count in counts.of.items():
        found[tenant] = found.get(tenant, 0) + round(count.value)
    return found


def _times(attempt: Attempt, arrived_s: float, now_s: float) -> Iterator[tuple[str, float, float]]:
    """Each SLO of the call: its name, its limit and the measured time, in seconds."""
    booking, usage = attempt.booking, attempt.answer.usage
    slo = booking.call.judged
    first_s = now_s if booking.first_token_s is None else booking.first_token_s
    tokens = 0 if usage is None else usage.output_tokens
    if slo.ttft_s is not None:
        yield "ttft", slo.ttft_s, first_s - arrived_s
    if slo.tpot_s is not None:
        yield "tpot", slo.tpot_s, (now_s - first_s) / max(1, tokens - 1)
    if slo.jct_s is not None:
        yield "jct", slo.jct_s, now_s - arrived_s
