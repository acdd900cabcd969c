"""The present problems of a fleet: each with a code, a sentence, and the time at which it began.

In: about once a second, the `Signs` of the fleet. State: samples of the last minutes and of the last hour, and the open
findings. Out: the `Problem`s. A finding becomes a problem once it has lasted for its threshold, and ends once it was
not found for `CLEAR_S`. No clock is read and no I/O is done.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from plait.gateway.config.values import RANK_NAME


class EngineSigns(NamedTuple):
    takes_calls: bool
    draining: bool
    health: str
    cause: str
    health_since: float
    """When its health last changed, in seconds since 1970."""
    slowness: float
    owed: int
    """Sent calls that have not ended."""
    silent_s: float
    """Seconds of silence while its calls wait and none runs; infinite: it is stalled; 0: it seems to compute."""
    differs: str | None
    """How it differs from what the gateway assumes."""
    reason: str = ""
    """Why its latest probe failed, in words that quote no request."""


class ModelSigns(NamedTuple):
    engines_up: int
    waiting: int
    wait_s: float
    """The predicted wait."""
    held_sessions: int
    prompt_tokens: int = 0
    """This and the following figures count since the gateway's start."""
    cached_tokens: int = 0
    slo_calls: int = 0
    slo_missed: int = 0


NO_MODEL: Final = ModelSigns(0, 0, 0.0, 0)


class TenantSigns(NamedTuple):
    """By tenant: waiting calls, and since the gateway's start the answered calls and those that engines failed."""

    waiting: Mapping[str, int]
    answered: Mapping[str, int]
    failed: Mapping[str, int]


NO_TENANTS: Final = TenantSigns({}, {}, {})


class Signs(NamedTuple):
    """The figures of a fleet at one time, from which its problems follow."""

    now_s: float
    """The event loop's time."""
    wall_s: float
    """Seconds since 1970."""
    engines: Mapping[str, EngineSigns]
    models: Mapping[str, ModelSigns]
    tenants: TenantSigns
    loop_late: float = 0.0
    """The part of the last ten seconds in which the event loop stood still."""
    resident_bytes: int = 0
    log_dropped: int = 0
    store_problem: str = ""
    refused_reload: Sequence[str] = ()
    """The problems of the configuration file at its last reload."""
    missed: Mapping[str, float] = MappingProxyType({})
    """Gateways that have died, with the time of death in seconds since 1970."""
    odd_peers: Mapping[str, tuple[str, str]] = MappingProxyType({})
    """Gateways that this one sends nothing: the code and the sentence of the problem, by address."""


class Threshold(NamedTuple):
    """How long a finding has to last to be a problem, and the `part` of docs/oncall.md that says what to do."""

    for_s: float
    part: str


THRESHOLDS: Final[Mapping[str, Threshold]] = {
    "no_engine": Threshold(2.0, "no-engine"),
    "engine_out": Threshold(2.0, "an-engine-is-out"),
    "engine_flaps": Threshold(0.0, "an-engine-is-out"),
    "engine_slow": Threshold(10.0, "an-engine-is-slow"),
    "engine_stuck": Threshold(5.0, "an-engine-is-stuck"),
    "engine_differs": Threshold(5.0, "an-engine-is-not-what-it-seems"),
    "hit_rate_fallen": Threshold(10.0, "the-hit-rate-has-fallen"),
    "queue_long": Threshold(10.0, "everything-queues"),
    "tenant_floods": Threshold(10.0, "a-tenant-floods"),
    "slo_missed": Threshold(5.0, "slos-are-missed"),
    "sessions_held": Threshold(60.0, "sessions-are-held"),
    "requests_break_engines": Threshold(0.0, "requests-break-engines"),
    "loop_late": Threshold(5.0, "the-gateway-is-late"),
    "memory_grows": Threshold(10.0, "memory-grows"),
    "log_dropped": Threshold(0.0, "the-log-drops-lines"),
    "store_failing": Threshold(2.0, "the-store-is-down"),
    "reload_refused": Threshold(0.0, "a-reload-was-refused"),
    "peer_lost": Threshold(0.0, "a-gateway-dies"),
    "peer_stale": Threshold(2.0, "a-gateway-dies"),
    "clocks_differ": Threshold(2.0, "gateways-do-not-trust-each-other"),
    "peer_not_trusted": Threshold(2.0, "gateways-do-not-trust-each-other"),
}
SLOW: Final = 1.5
"""`engine_slow`: the slowness, relative to the fleet."""
FLAPS, FLAPS_S = 3, 600.0
"""`engine_flaps`: how often an engine went out, within how many seconds."""
SILENT_S: Final = 10.0
LONG_WAIT_S: Final = 30.0
FALLEN: Final = 0.5
"""`hit_rate_fallen`: the part of the usual hit rate."""
LEAST_HIT_RATE: Final = 0.1
LEAST_TOKENS: Final = 200_000
"""The least prompt tokens for a hit rate."""
FLOOD, FLOOD_TIMES = 20, 5
"""`tenant_floods`: the least waiting calls of the tenant, and their multiple of all others' waiting calls."""
MISSED, LEAST_MISSED = 0.05, 5
BREAKING, LEAST_FAILED, OTHERS = 0.8, 5, 0.2
"""`requests_break_engines`: the tenant's part of all failed calls; the least number of them; the most of the failures
expected of other tenants, at this tenant's failure rate, that really came (at least `LEAST_FAILED` are expected).
"""
LATE: Final = 0.05
GROWN, LEAST_GROWN_BYTES = 1.5, 200 * 2**20
MEMORY_S: Final = 120.0
"""A problem is a rate over this time."""
USUAL_S: Final = 3600.0
"""The time before, whose rate is the usual one."""
CLEAR_S: Final = 15.0
"""A problem is over once it was not found for this long."""
LATELY_S: Final = 30.0
"""A change over `MEMORY_S` is a problem only if the last seconds show it too, so that a repaired one ends soon."""
SAMPLE_S: Final = 5.0
BEFORE_S: Final = 60.0
"""The intervals of the samples within `MEMORY_S`, and of the older ones."""


class Problem(msgspec.Struct, frozen=True):
    """A problem of `about`: an engine, a model, a tenant, or "" for the gateway."""

    code: str
    about: str
    since: float
    sentence: str
    part: str


class Finding(NamedTuple):
    """A problem at one look, before it has lasted for its threshold."""

    code: str
    about: str
    sentence: str
    since_wall_s: float | None = None


@dataclass(slots=True)
class _Open:
    """A finding with its begin, and when it was last found."""

    finding: Finding
    since_s: float
    since_wall_s: float
    seen_s: float


class Problems:
    """Finds the problems. `on_change` is called with each that begins (True) or ends (False)."""

    def __init__(self, on_change: Callable[[Problem, bool], object] = lambda _problem, _begins: None) -> None:
        self.now: tuple[Problem, ...] = ()
        self._on_change = on_change
        self._samples: deque[Signs] = deque()  # of the last `MEMORY_S`, without engines
        self._before: deque[Signs] = deque()  # of the `USUAL_S` before, without tenants
        self._outs: dict[str, deque[float]] = {}
        self._were_out = set[str]()
        self._began_s: float | None = None
        self._open: dict[tuple[str, str], _Open] = {}

    def look(self, signs: Signs) -> tuple[Problem, ...]:
        """Add the signs; returns the present problems, the oldest first."""
        self._remember(signs)
        for finding in _of_addresses(self._findings(signs), signs.engines):
            key = finding.code, finding.about
            known = self._open.get(key)
            if known is None:
                wall_s = signs.wall_s if finding.since_wall_s is None else finding.since_wall_s
                self._open[key] = _Open(finding, signs.now_s, wall_s, signs.now_s)
            else:
                known.finding, known.seen_s = finding, signs.now_s
        self._open = {key: one for key, one in self._open.items() if signs.now_s - one.seen_s <= CLEAR_S}
        named = [one for one in self._open.values() if one.seen_s - one.since_s >= THRESHOLDS[one.finding.code].for_s]
        before = {(one.code, one.about): one for one in self.now}
        self.now = tuple(sorted(map(_problem, named), key=lambda one: one.since))
        after = {(one.code, one.about): one for one in self.now}
        for key in after.keys() - before.keys():
            self._on_change(after[key], True)
        for key in before.keys() - after.keys():
            self._on_change(before[key], False)
        return self.now

    def _remember(self, signs: Signs) -> None:
        self._began_s = signs.now_s if self._began_s is None else self._began_s
        out = {name for name, engine in signs.engines.items() if _is_out(engine)}
        for name in out - self._were_out:
            self._outs.setdefault(name, deque()).append(signs.now_s)
        self._were_out = out
        for times in self._outs.values():
            while times and times[0] < signs.now_s - FLAPS_S:
                times.popleft()
        self._outs = {name: times for name, times in self._outs.items() if times and name in signs.engines}
        if not self._samples or signs.now_s - self._samples[-1].now_s >= SAMPLE_S:
            self._samples.append(signs._replace(engines={}))
        while self._samples[0].now_s < signs.now_s - MEMORY_S:
            old = self._samples.popleft()
            if not self._before or old.now_s - self._before[-1].now_s >= BEFORE_S:
                self._before.append(old._replace(tenants=NO_TENANTS))
        while self._before and self._before[0].now_s < signs.now_s - MEMORY_S - USUAL_S:
            self._before.popleft()

    def _findings(self, signs: Signs) -> Iterator[Finding]:
        for name, engine in signs.engines.items():
            yield from _of_engine(name, engine)
            if len(self._outs.get(name, ())) >= FLAPS:
                yield Finding("engine_flaps", name, f"{name} went out {len(self._outs[name])} times in ten minutes.")
        recent = self._samples[0]
        first = self._before[0] if self._before else recent
        lately = next(one for one in self._samples if one.now_s >= signs.now_s - LATELY_S)
        for name, model in signs.models.items():
            usual, before, latest = (one.models.get(name, NO_MODEL) for one in (first, recent, lately))
            yield from _of_model(name, model)
            yield from _of_slos(name, before, latest, model)
            yield from _of_hit_rate(name, usual, before, latest, model)
        yield from _of_tenants(signs, recent, lately)
        yield from _of_gateway(signs, lately)
        if self._began_s is not None and signs.now_s - self._began_s >= 2 * MEMORY_S:  # it loads much at start
            yield from _of_memory(signs, recent, lately, LATELY_S / MEMORY_S)


def _of_addresses(findings: Iterable[Finding], engines: Iterable[str]) -> Iterator[Finding]:
    """What is found of each data-parallel rank of an address is the address's, in the words about the first."""
    ranks = Counter(RANK_NAME.sub("", name) for name in engines)
    found = defaultdict[tuple[str, str], list[Finding]](list)
    for one in findings:
        found[one.code, RANK_NAME.sub("", one.about)].append(one)
    for (_, address), (first, *others) in found.items():
        if others and 1 + len(others) == ranks[address]:
            sentence = first.sentence.replace(first.about, f"Each rank of {address}", 1)
            yield first._replace(about=address, sentence=sentence)
        else:
            yield from (first, *others)


def _problem(one: _Open) -> Problem:
    finding = one.finding
    part = THRESHOLDS[finding.code].part
    return Problem(finding.code, finding.about, round(one.since_wall_s, 3), finding.sentence, part)


def _is_out(engine: EngineSigns) -> bool:
    return not engine.takes_calls and not engine.draining and engine.health != "untried"


def _of_engine(name: str, engine: EngineSigns) -> Iterator[Finding]:
    if _is_out(engine):
        why = f" ({engine.cause})" if engine.cause else ""
        why += f": {engine.reason}" if engine.reason else ""
        yield Finding("engine_out", name, f"{name} takes no calls: it is {engine.health}{why}.", engine.health_since)
        return
    if engine.slowness >= SLOW:
        yield Finding(
            "engine_slow", name, f"{name} computes {engine.slowness:.1f} times slower than is usual in the fleet."
        )
    if engine.owed and engine.silent_s >= SILENT_S:
        yield Finding("engine_stuck", name, f"{name} has {engine.owed} calls and sends nothing to any of them.")
    if engine.differs is not None:
        yield Finding("engine_differs", name, f"{name} is not what the gateway takes it for: {engine.differs}.")


def _of_model(name: str, model: ModelSigns) -> Iterator[Finding]:
    if not model.engines_up:
        yield Finding("no_engine", name, f"No engine takes calls for {name}.")
    if model.wait_s >= LONG_WAIT_S:
        waits = f"{model.waiting} calls wait for {name}, {model.wait_s:.0f} s by prediction"
        yield Finding("queue_long", name, f"{waits}: the fleet is too small, or engines are out.")
    if model.held_sessions:
        held = f"{model.held_sessions} sessions of {name} are held"
        yield Finding("sessions_held", name, f"{held}: their contexts do not fit into the engines' caches.")


def _of_slos(name: str, before: ModelSigns, lately: ModelSigns, now: ModelSigns) -> Iterator[Finding]:
    calls, missed = now.slo_calls - before.slo_calls, now.slo_missed - before.slo_missed
    missed_lately = now.slo_missed - lately.slo_missed
    if missed_lately < max(1, MISSED * (now.slo_calls - lately.slo_calls)):
        return
    if missed >= max(LEAST_MISSED, MISSED * calls):
        yield Finding("slo_missed", name, f"{missed} of {calls} promised times of calls for {name} were missed.")


def _of_hit_rate(
    name: str, first: ModelSigns, before: ModelSigns, lately: ModelSigns, now: ModelSigns
) -> Iterator[Finding]:
    usual, rate = _hit_rate(first, before), _hit_rate(before, now)
    latest = _hit_rate(lately, now, least_tokens=1)
    if usual is None or rate is None or latest is None or usual < LEAST_HIT_RATE:
        return
    if max(rate, latest) < FALLEN * usual:
        yield Finding(
            "hit_rate_fallen", name, f"{rate:.0%} of prompt tokens for {name} are cached, before {usual:.0%}."
        )


def _hit_rate(before: ModelSigns, now: ModelSigns, least_tokens: int = LEAST_TOKENS) -> float | None:
    """The hit rate between two times; None with too few tokens."""
    tokens = now.prompt_tokens - before.prompt_tokens
    return None if tokens < least_tokens else (now.cached_tokens - before.cached_tokens) / tokens


def _of_tenants(signs: Signs, recent: Signs, lately: Signs) -> Iterator[Finding]:
    now, before = signs.tenants, recent.tenants
    waiting = sum(now.waiting.values())
    answered = sum(now.answered.values()) - sum(before.answered.values())
    failed = sum(now.failed.values()) - sum(before.failed.values())
    for name, calls in now.waiting.items():
        others_wait = waiting - calls
        if calls < max(FLOOD, FLOOD_TIMES * others_wait):
            continue
        if others_wait or answered + failed > sum(_since(before, now, name)):
            yield Finding("tenant_floods", name, f"{calls} of the {waiting} calls that wait are of {name}.")
    for name, count in now.failed.items():
        if count == lately.tenants.failed.get(name, 0):
            continue
        its_answered, its_failed = _since(before, now, name)
        if its_failed < max(LEAST_FAILED, BREAKING * failed):
            continue
        others_failed = failed - its_failed
        others_calls = answered - its_answered + others_failed
        expected = others_calls * its_failed / (its_answered + its_failed)  # if it were the engines' fault
        if expected >= LEAST_FAILED and others_failed <= OTHERS * expected:
            sentence = f"{its_failed} of the {failed} calls that engines failed are of {name}."
            yield Finding("requests_break_engines", name, sentence)


def _since(before: TenantSigns, now: TenantSigns, name: str) -> tuple[int, int]:
    """(answered calls, calls that engines failed) of a tenant between two times."""
    counts = ((before.answered, now.answered), (before.failed, now.failed))
    answered, failed = (after.get(name, 0) - at_first.get(name, 0) for at_first, after in counts)
    return answered, failed


def _of_memory(signs: Signs, recent: Signs, lately: Signs, part: float) -> Iterator[Finding]:
    """`part` is the time since `lately`, as a part of `MEMORY_S`."""
    grown, grown_lately = (signs.resident_bytes - before.resident_bytes for before in (recent, lately))
    if grown_lately < part * LEAST_GROWN_BYTES:
        return
    if grown >= LEAST_GROWN_BYTES and signs.resident_bytes >= GROWN * recent.resident_bytes:
        yield Finding("memory_grows", "", f"The gateway's memory has grown by {grown / 2**20:.0f} MiB.")


def _of_gateway(signs: Signs, lately: Signs) -> Iterator[Finding]:
    if signs.loop_late >= LATE:
        late = f"The gateway stood still for {signs.loop_late:.0%} of the last ten seconds"
        yield Finding("loop_late", "", f"{late}: it needs more CPU.")
    dropped = signs.log_dropped - lately.log_dropped
    if dropped:
        yield Finding("log_dropped", "", f"{dropped} lines of the log were dropped: whoever reads it is too slow.")
    if signs.store_problem:
        yield Finding("store_failing", "", f"The store cannot be written: {signs.store_problem}.")
    if signs.refused_reload:
        why = "; ".join(signs.refused_reload)
        yield Finding("reload_refused", "", f"A reload was refused, and what was before stays: {why}.")
    for url, since_wall_s in signs.missed.items():
        yield Finding("peer_lost", url, f"The gateway at {url} has died, and is not back.", since_wall_s)
    for url, (code, sentence) in signs.odd_peers.items():
        yield Finding(code, url, sentence)
