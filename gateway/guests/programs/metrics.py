"""Prometheus metrics of programs: sessions, waiting calls, and jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plait.gateway.guests.programs.core.consequences import Job
from plait.gateway.guests.programs.core.sessions import Sessions
from plait.gateway.metrics import FastCounter, FastHistogram
from plait.policy.types import Slo

JCT_BUCKETS_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
HELD_BYTES = "Bytes of values, generated texts, bodies of calls that have not ended, and recorded answers"
HOLD_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class ProgramMetrics:
    """Counters and histograms of calls of programs. `tenant_label` turns a tenant into the name that operators see."""

    def __init__(self, registry: CollectorRegistry, tenant_label: Callable[[str], str] = str) -> None:
        self._tenant_label = tenant_label
        hold = FastHistogram(
            "plait_hold_seconds",
            "Time from the arrival of a call with inputs until all of them have values",
            (),
            HOLD_BUCKETS_S,
        )
        registry.register(hold)
        self._hold = hold.of[()]
        self._retries = Counter(
            "plait_calls_restarted",
            "Retries of chained calls, by the engine that failed",
            ["model", "engine"],
            registry=registry,
        )

        self._jct = Histogram(
            "plait_jct_seconds",
            "Job completion time: arrival of a program's first call to the value that a get waited for",
            ["objective"],
            buckets=JCT_BUCKETS_S,
            registry=registry,
        )
        self._jobs = FastCounter(
            "plait_slo_jobs", "Jobs with a JCT objective, by whether it was met", ["tenant", "met"]
        )
        registry.register(self._jobs)

    def job_ended(self, job: Job) -> None:
        times = job.mark if isinstance(job.mark, Slo) else None
        objective = "" if job.mark is None else "times" if times is not None else str(job.mark)
        self._jct.labels(objective).observe(job.seconds)
        if times is not None and times.jct_s is not None:
            met = "yes" if job.seconds <= times.jct_s else "no"
            self._jobs.of[self._tenant_label(job.tenant), met].value += 1

    def held(self, hold_s: float) -> None:
        """Record how long a call waited for its inputs."""
        self._hold.observe(hold_s)

    def tried_again(self, model: str, engine_id: str) -> None:
        """Count a new delivery of a call whose answer broke off, by the engine that failed."""
        self._retries.labels(model, engine_id).inc()


class SessionCollector(Collector):
    """The state of the sessions, read when scraped. `variables`: numbers of variables set, failed and skipped."""

    def __init__(self, sessions: Sessions, variables: Mapping[str, int]) -> None:
        self._sessions = sessions
        self._variables = variables

    def collect(self) -> Iterator[Metric]:
        tenants = self._sessions.tenants.values()
        gauges = [
            ("program_sessions", "Sessions of programs", len(self._sessions)),
            ("semantic_variables", "Semantic variables", sum(tenant.variables for tenant in tenants)),
            ("held_calls", "Calls that wait for inputs", sum(tenant.waiting_calls for tenant in tenants)),
            ("held_bytes", HELD_BYTES, sum(tenant.held_bytes for tenant in tenants)),
            ("recorded_answer_bytes", "Bytes of recorded answers", sum(tenant.answer_bytes for tenant in tenants)),
            ("deleted_sessions", "Ids of deleted sessions that are refused", len(self._sessions.deleted)),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"plait_{name}", text, value)
        evicted = CounterMetricFamily(
            "plait_sessions_evicted", "Idle sessions evicted, by what their tenant needed", labels=["needed"]
        )
        for needed in ("sessions", "variables", "bytes"):
            evicted.add_metric([needed], self._sessions.evicted[needed])
        yield evicted
        ended = CounterMetricFamily(
            "plait_variables", "Semantic variables that were set, failed or skipped", labels=["state"]
        )
        for state in ("set", "failed", "skipped"):
            ended.add_metric([state], self._variables[state])
        yield ended
