"""Two engines in virtual time, and a gateway that estimates their caches or is told of them.

An estimated engine is as a stock vLLM: the gateway knows the size that the engine gives for its cache, and reads how
many calls run and wait there as often as it reads metrics. What else it learns of the cache is in the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final, Literal

from benchmarks.estimating.engines import ForgetfulEngine, UncachedEngine, renamed
from plait.backends.profiles import load_profile
from plait.backends.protocol.engine_counts import EngineCounts, EngineSizes
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.health import HealthChange
from plait.gateway.fleet.router import Router
from plait.gateway.membership.stock_engine import INTERVAL_S
from plait.lab.embedded.call import EmbeddedCall
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.ranks import Ranks
from plait.lab.simulation.compare import MODEL, Experiment, Workload, arrival_times, schedule
from plait.lab.simulation.simulate import CallRecord, SimulatedCall, Simulation
from plait.policy.prefix.residency import Residency

ENGINES: Final = ("engine-0", "engine-1")
THEIRS: Final = 2**18
"""Beyond the numbers of a gateway's calls and the seeds: for what other clients send."""

System = Literal["oracle", "answers", "not told", "least outstanding"]
"""What a gateway hears of the hits: with `oracle` the engines report their caches, with `answers` each answer has its
cached tokens, and with the others none has. `least outstanding` needs neither.
"""


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong about the estimates."""

    size: float = 1.0
    """The caches' true size, in units of what the engines give."""
    others: bool = False
    """Other clients send the engines as many calls, past the gateway, about prefixes of their own."""
    uncached: int = 0
    """The prefix caching of so many engines is off."""
    lost: bool = False
    """The first engine loses its cache after half of the calls, and nobody sees it."""


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of a run. `theirs` are those of other clients. Without `rate_per_s`, all come at once.

    `waiting`: engines tell waiting calls from running ones, as vLLM does. Otherwise all count as running.
    """

    asked: Experiment
    ours: Workload
    theirs: Workload
    rate_per_s: float | None = None
    waiting: bool = False


class SilentRouter(Router):
    """A gateway whose engines do not say in answers how much of a prompt was cached, which is vLLM's default."""

    def settle(self, booking: Booking, usage: CallUsage | None, now_s: float) -> HealthChange | None:
        silent = None if usage is None else usage._replace(cached_tokens=None)
        return super().settle(booking, silent, now_s)


class Run:
    """One system's run of a load, on engines of which the estimates are wrong."""

    def __init__(self, system: System, wrong: Wrong, load: Load) -> None:
        self._wrong, self._load = wrong, load
        self._costs = load_profile(load.asked.profile).cost_model()
        self._engines = {
            name: self._engine(name, uncached=place < wrong.uncached) for place, name in enumerate(ENGINES)
        }
        self._reporting = {name for name in ENGINES if system == "oracle" and name not in ENGINES[: wrong.uncached]}
        known = {name: one if name in self._reporting else Ranks([one]) for name, one in self._engines.items()}
        self._router = self._new_router(system)
        self._simulation = Simulation(self._router, known, MODEL)
        self._records: dict[int, CallRecord] = {}
        self._ended = 0
        self._others = count(1)

    def __call__(self) -> list[CallRecord]:
        """The records of the gateway's calls, in the workload's order."""
        load, simulation, thinks = self._load, self._simulation, self._load.rate_per_s is not None
        times_s = _gently(arrival_times(load.asked, load.ours, load.rate_per_s))
        schedule(simulation, load.ours, times_s, self._send, thinks=thinks)
        if self._wrong.others:
            asked = replace(load.asked, seed=load.asked.seed + THEIRS)
            times_s = _gently(arrival_times(asked, load.theirs, load.rate_per_s))
            schedule(simulation, load.theirs, times_s, self._bypass, thinks=thinks)
        simulation.at(0.0, self._count)
        simulation.run()
        return [self._records[number] for number in range(len(load.ours.calls))]

    def _engine(self, name: str, *, uncached: bool) -> ForgetfulEngine | UncachedEngine:
        settings = EngineSettings(
            name=name,
            model=MODEL,
            kv_tokens=round(self._wrong.size * self._load.ours.kv_tokens),
            block_tokens=self._load.asked.block_tokens,
        )
        return (UncachedEngine if uncached else ForgetfulEngine)(settings, self._costs)

    def _new_router(self, system: System) -> Router:
        policy = "least_outstanding" if system == "least outstanding" else "plait"
        router = (Router if system in {"oracle", "answers"} else SilentRouter)(policy, gateway_id="gateway")
        for name in ENGINES:
            router.add_engine(name, self._costs)
            if name not in self._reporting:
                sizes = EngineSizes(
                    kv_tokens=self._load.ours.kv_tokens, slots=self._engines[name].settings.max_running_calls
                )
                router.no_reports(name)
                router.recognised(name, "vllm", sizes)
                if system == "oracle":
                    know_uncached(router.engines[name].view.residency)
        return router

    def _send(self, number: int, now_s: float, on_ended: Callable[[object], None]) -> None:
        call, prompt = self._load.ours.calls[number], self._load.ours.prompts[number]
        simulated = SimulatedCall(now_s, prompt, call.max_tokens, call.prefix, session=call.session)
        self._records[number] = self._simulation.send(simulated, partial(self._end, on_ended))
        first = self._engines[ENGINES[0]]
        if self._wrong.lost and 2 * len(self._records) == len(self._load.ours.calls):
            assert isinstance(first, ForgetfulEngine)
            first.lose_cache()

    def _end(self, on_ended: Callable[[object], None], record: CallRecord) -> None:
        self._ended += 1
        on_ended(record)

    def _bypass(self, number: int, now_s: float, on_ended: Callable[[object], None]) -> None:
        """Other clients take the engines in turn."""
        call, prompt, place = self._load.theirs.calls[number], self._load.theirs.prompts[number], next(self._others)
        embedded_call = EmbeddedCall(
            f"other-{number}",
            now_s,
            prompt.tokens,
            chain=renamed(prompt.chain, THEIRS),
            tree_chain=renamed(prompt.tree_chain, THEIRS),
            final_output_tokens=call.max_tokens,
            output=count((THEIRS + number) << 12),
        )
        self._simulation.bypass(embedded_call, ENGINES[place % len(ENGINES)], on_ended)

    def _count(self, now_s: float) -> None:
        """The gateway reads the metrics of the engines that do not report."""
        for name, engine in self._engines.items():
            if name in self._reporting:
                continue
            running, waiting = len(engine.running), len(engine.waiting)
            if not self._load.waiting:
                running, waiting = running + waiting, 0
            self._router.counted(name, EngineCounts(running, waiting, None, engine.counters.iterations), now_s)
        if self._ended < len(self._load.ours.calls):
            self._simulation.at(now_s + INTERVAL_S, self._count)


def _gently(times_s: Sequence[float]) -> list[float]:
    """The times of arrivals at half of the rate for the first half, which teaches."""
    middle = len(times_s) // 2
    return [time_s + min(time_s, times_s[middle]) for time_s in times_s]


def know_uncached(residency: Residency) -> None:
    """Let a gateway know that an engine's prefix caching is off: it expects no block there, also of running calls."""
    for question in ("cached_blocks", "ready_blocks"):
        setattr(residency, question, _none)


def _none(_where: object) -> int:
    return 0
