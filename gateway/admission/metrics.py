"""Prometheus metrics of admission: waiting calls and sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.admission.admission import Admission
from plait.policy.sessions.session_gate import SessionGate


class AdmissionCollector(Collector):
    """Waiting calls and sessions, read when scraped. Refused calls are in `plait_refusals_total`.

    `tenant_label` returns the label of a tenant for operators.
    """

    def __init__(self, admission: Admission, tenant_label: Callable[[str], str] = str) -> None:
        self._admission = admission
        self._tenant_label = tenant_label

    def collect(self) -> Iterator[Metric]:
        """Waiting calls and their predicted wait, by model, and by tenant with waiting calls."""
        of_all = _families("plait_waiting", "Calls that wait to be sent to their engine", ["model"])
        of_one = _families("plait_tenant_waiting", "Calls of a tenant that wait", ["tenant", "model"])
        for model, backlog in list(self._admission.queue.backlogs.items()):
            _add(of_all, [model], backlog.length, backlog.wait_s)
            for tenant in backlog.tenants():
                labels = [self._tenant_label(tenant), model]
                _add(of_one, labels, backlog.waiting(tenant), backlog.tenant_wait_s(tenant))
        yield from (*of_all, *of_one)
        yield from _of_sessions(self._admission.sessions.gates)


def _of_sessions(gates: Mapping[str, SessionGate]) -> Iterator[Metric]:
    sessions = GaugeMetricFamily("plait_sessions", "Agents' sessions", labels=["model", "state"])
    closed = GaugeMetricFamily("plait_session_gate_closed", "1 while sessions may be held", labels=["model"])
    tokens = GaugeMetricFamily("plait_session_live_tokens", "Contexts of live sessions, and chat", labels=["model"])
    room = GaugeMetricFamily("plait_session_kv_tokens", "KV of the engines that take calls", labels=["model"])
    value = GaugeMetricFamily("plait_session_value", "Prefill seconds saved for a second in caches", labels=["model"])
    load = GaugeMetricFamily("plait_session_load", "Share of time to compute all contexts anew", labels=["model"])
    ends = CounterMetricFamily("plait_sessions_stopped", "Live sessions that gave room", labels=["model", "reason"])
    for model, gate in list(gates.items()):
        sessions.add_metric([model, "live"], len(gate.live))
        sessions.add_metric([model, "held"], len(gate.held))
        closed.add_metric([model], gate.worth.is_closed)
        tokens.add_metric([model], gate.tokens)
        room.add_metric([model], 0 if gate.worth.caches is None else gate.worth.caches.kv_tokens)
        value.add_metric([model], gate.worth.value)
        load.add_metric([model], gate.worth.load)
        ends.add_metric([model, "paused"], gate.paused)
        ends.add_metric([model, "expired"], gate.expired)
    yield from (sessions, closed, tokens, room, value, load, ends)


def _families(name: str, what: str, labels: Sequence[str]) -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    calls = GaugeMetricFamily(f"{name}_calls", what, labels=labels)
    return calls, GaugeMetricFamily(f"{name}_seconds", "Predicted time until all of them are sent", labels=labels)


def _add(families: Iterable[GaugeMetricFamily], labels: Sequence[str], *values: float) -> None:
    for family, value in zip(families, values, strict=True):
        family.add_metric(labels, value)
