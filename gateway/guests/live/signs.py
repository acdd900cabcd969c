"""Collects the `Signs` of a gateway's fleet, from which `problems` finds its problems."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf
from pathlib import Path
from resource import getpagesize
from time import time
from typing import Final, Protocol

from plait.gateway.admission.admission import Admission
from plait.gateway.calls.metrics import NO_TOTALS, CallMetrics
from plait.gateway.doors import StoreState
from plait.gateway.fleet.engine import FleetEngine, degradation
from plait.gateway.fleet.router import Router
from plait.gateway.guests.live.problems import EngineSigns, ModelSigns, Signs, TenantSigns
from plait.gateway.log.events import dropped_lines
from plait.gateway.others import Others

LATE_WITHIN_S: Final = 10.0
_STATM: Final = Path("/proc/self/statm")


class Reloads(Protocol):
    refused: list[str]
    """The problems of the configuration file at its last reload; empty if it was taken."""


@dataclass(frozen=True, slots=True)
class SeenFleet:
    """The sources of the signs. `configured` are the configured models. `label` returns a tenant's label."""

    router: Router
    admission: Admission
    metrics: CallMetrics
    label: Callable[[str], str]
    configured: Collection[str]
    reloads: Reloads
    store: StoreState
    others: Others

    def signs(self, now_s: float) -> Signs:
        lag = self.router.health.lag
        return Signs(
            now_s,
            time(),
            self._engines(now_s),
            self._models(),
            self._tenants(),
            lag.since(now_s - LATE_WITHIN_S, now_s) / LATE_WITHIN_S,
            _resident_bytes(),
            sum(dropped_lines().values()),
            self.store.problem or "",
            self.reloads.refused,
            self.others.missed,
            self.others.odd,
        )

    def _engines(self, now_s: float) -> dict[str, EngineSigns]:
        handing_over = self.router.hand_over
        return {
            name: _engine(engine, now_s, draining=engine.draining or name in handing_over)
            for name, engine in self.router.engines.items()
        }

    def _models(self) -> dict[str, ModelSigns]:
        backlogs, gates = self.admission.queue.backlogs, self.admission.sessions.gates
        totals, found = self.metrics.of_models(), {}
        for model in sorted(self.router.models.names | set(self.configured)):
            backlog, gate, total = backlogs.get(model), gates.get(model), totals.get(model, NO_TOTALS)
            found[model] = ModelSigns(
                self.router.models.serving(model),
                0 if backlog is None else backlog.length,
                0.0 if backlog is None else backlog.wait_s,
                0 if gate is None else len(gate.held),
                *map(round, total),
            )
        return found

    def _tenants(self) -> TenantSigns:
        waiting: dict[str, int] = {}
        for backlog in self.admission.queue.backlogs.values():
            for tenant in backlog.tenants():
                label = self.label(tenant)
                waiting[label] = waiting.get(label, 0) + backlog.waiting(tenant)
        answered, failed = self.metrics.of_tenants()
        for counts in (waiting, answered, failed):
            counts.pop("", None)
        return TenantSigns(waiting, answered, failed)


def _engine(engine: FleetEngine, now_s: float, *, draining: bool) -> EngineSigns:
    view, report = engine.view, engine.cache.last_report
    owed = view.outstanding - view.queue.unsent
    silent_s = now_s - engine.progress.owes_since_s(now_s)
    if engine.stalled:
        silent_s = inf
    elif report is None or report.queue.running or not report.queue.waiting:
        silent_s = 0.0  # silence counts only if calls wait in the engine and none runs
    return EngineSigns(
        engine.health.takes_calls,
        draining,
        engine.health.state.value,
        engine.health.cause,
        engine.health_since,
        view.slowness,
        owed,
        silent_s,
        degradation(engine),
        engine.why_down,
    )


def _resident_bytes() -> int:
    """The memory of this process; 0 where the system does not say."""
    try:
        return int(_STATM.read_bytes().split()[1]) * getpagesize()
    except OSError:
        return 0
