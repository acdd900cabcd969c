"""CPU time of an event of a session with 64 calls and 8 end-to-end times: `python -m benchmarks session_events`.

An executor is driven directly, without a gateway or engines, through whole programs of several shapes: gets, calls and
the client's value arrive, every call is started, makes its output and finishes, and every get is answered. The gets
come before the calls or after them. Each event is timed by itself; garbage is collected between programs.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Final

from benchmarks.chaining.figures import Spread
from benchmarks.running.command import timed_parser
from benchmarks.running.report import Report, finish
from plait.backends.errors import PlaitError
from plait.gateway.config.sessions import SessionsConfig
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.held_call import HeldCall, Output, Promise, ReadyCall
from plait.gateway.guests.programs.core.session import Getter, Session
from plait.lab.simulation.claim import Claim
from plait.policy.types import Slo

TARGET_MS: Final = 1.0
ANY: Final = "any"
"""Every event of a program, whatever its kind."""
JCT_S: Final = 600.0
"""Of the first get; each further one has a second more."""
EVENT_S: Final = 0.05
"""How far the clock moves on with each event."""
CALL_S: Final = 2.0
"""The predicted time of a call, give or take half of it."""

Steps = list[tuple[tuple[str, ...], str]]
"""What each call of a program takes and makes, producers first; `task` is the client's value."""


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of an application, and the variables that it gets, once for each get.

    What is not `claimed` is measured only: it shows where the cost of links begins to tell.
    """

    name: str
    steps: Steps
    awaited: list[str]
    claimed: bool = True


def programs() -> list[Program]:
    """The shapes: chains beside each other, one long chain, map-reduces, and layers that take all of the one before."""
    chains = [((f"v{chain}.{at}" if at else "task",), f"v{chain}.{at + 1}") for chain in range(8) for at in range(8)]
    chain = [((f"v{at}" if at else "task",), f"v{at + 1}") for at in range(64)]
    reduces: Steps = []
    for job in range(4):
        maps = [f"m{job}.{part}" for part in range(16)]
        reduces += [*((("task",), part) for part in maps), (tuple(maps), f"r{job}")]
    layers: Steps = [(("task",), f"v0.{at}") for at in range(8)]
    layers += [
        (tuple(f"v{layer - 1}.{i}" for i in range(8)), f"v{layer}.{at}") for layer in range(1, 8) for at in range(8)
    ]
    dense: Steps = [(tuple(f"v{i}" for i in range(1, at + 1)) or ("task",), f"v{at + 1}") for at in range(64)]
    return [
        Program("8 chains of 8", list(chains), [f"v{number}.8" for number in range(8)]),
        Program("a chain of 64", list(chain), [f"v{at}" for at in range(8, 65, 8)]),
        Program("4 map-reduces of 16 + 1", reduces, [f"r{job}" for job in range(4)] * 2),
        Program("8 layers of 8", layers, [f"v7.{at}" for at in range(8)]),
        Program("64 calls that take all before them", dense, [f"v{at}" for at in range(57, 65)], claimed=False),
    ]


@dataclass(eq=False)
class Owner:
    """Puts its call among those that are to be started."""

    call_id: str
    ready: list[str]

    def on_ready(self, _ready: ReadyCall) -> None:
        """The call may be started."""
        self.ready.append(self.call_id)

    def on_refined(self, _promise: Promise) -> None:
        """No engine is told."""

    def on_broken(self, error: PlaitError) -> None:
        """Nothing fails here."""
        raise error


@dataclass
class Run:
    """One program from its first event to its last. `times_s` are the events' CPU times, by what happened."""

    program: Program
    dice: random.Random
    times_s: dict[str, list[float]] = field(default_factory=dict)
    now_s: float = 0.0
    answered: int = 0

    def __post_init__(self) -> None:
        self.executor = Executor(SessionsConfig(), self._predicted_s, lambda _when_s, _event: None)
        self.session: Session = self.executor.sessions.open("tenant", "session", 0.0)
        self.calls: dict[str, HeldCall] = {}
        self.ready: list[str] = []

    def whole(self, *, gets_first: bool) -> None:
        """Everything that happens."""
        arrivals = (self._get, self._add) if gets_first else (self._add, self._get)
        for arrive in arrivals:
            arrive()
        self._timed("set_value", self.executor.variables.set_value, self.session, "task", "a task", self.now_s)
        while self.ready:
            call = self.calls[self.ready.pop(self.dice.randrange(len(self.ready)))]
            self._timed("start", self.executor.start, call, self.now_s)
            self._timed("produce", self.executor.produce, call, "some text", self.now_s)
            self._timed("finish", self.executor.finish, call, self.now_s)
        assert self.answered == len(self.program.awaited)
        assert not self.session.calls

    def _add(self) -> None:
        for number, (inputs, output) in enumerate(self.program.steps):
            call_id = f"c{number}"
            call = HeldCall(call_id, inputs, (Output(output),), Owner(call_id, self.ready))
            self.calls[call_id] = call
            self._timed("add", self.executor.add, self.session, call, self.now_s)

    def _get(self) -> None:
        for number, variable in enumerate(self.program.awaited):
            getter = Getter(variable, self._on_value, self._on_failed, Slo(jct_s=JCT_S + number))
            self._timed("get", self.executor.variables.get, self.session, getter, self.now_s)

    def _on_value(self, _value: str) -> None:
        self.answered += 1

    def _on_failed(self, error: PlaitError) -> None:
        raise error

    def _predicted_s(
        self, _model: str, _prompt_tokens: int, _output_limit: int | None, *, in_group: bool = False
    ) -> float:
        del in_group
        return CALL_S * self.dice.uniform(0.5, 1.5)

    def _timed(self, what: str, event: Callable[..., None], *arguments: object) -> None:
        began_s = time.process_time()
        event(*arguments)
        self.times_s.setdefault(what, []).append(time.process_time() - began_s)
        self.now_s += EVENT_S


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of CPU time of one kind of event, or of all (`any`), in one shape of program."""

    program: str
    gets_first: bool
    event: str
    events: int
    median_ms: float
    p99_ms: float
    max_ms: float


def main() -> int:
    """Measure, print, write what was asked for; returns 1 if a claim fails."""
    parser = timed_parser(__doc__)
    parser.add_argument("--programs", type=int, default=30, help="programs per shape and order (default: %(default)s)")
    arguments = parser.parse_args()
    costs, claims, lines = [], [], []
    for program in programs():
        for gets_first in (True, False):
            measured = list(measure(program, arguments.programs, gets_first=gets_first))
            costs += measured
            if program.claimed:
                claims.append(_claim(program, measured, gets_first=gets_first))
            lines.append(f"{program.name}, {_order(gets_first)}")
            lines += [
                f"  {cost.event:<10}{cost.events:>7} events: median {cost.median_ms:7.3f} ms, "
                f"p99 {cost.p99_ms:7.3f} ms, max {cost.max_ms:7.3f} ms"
                for cost in measured
            ]
    report = Report(lines=lines, claims=claims, results=[asdict(cost) for cost in costs], is_timed=True)
    return finish("session_events", report, arguments)


def measure(program: Program, runs: int, *, gets_first: bool) -> Iterator[Cost]:
    """The cost of each kind of event, over so many runs of a program and one before them that is not counted."""
    times_s: dict[str, list[float]] = {}
    for number in range(runs + 1):
        run = Run(program, random.Random(number))
        gc.collect()
        gc.disable()
        run.whole(gets_first=gets_first)
        gc.enable()
        if number:
            for event, event_times_s in run.times_s.items():
                times_s.setdefault(event, []).extend(event_times_s)
    times_s[ANY] = [time_s for event_times_s in times_s.values() for time_s in event_times_s]
    for event, event_times_s in times_s.items():
        spread = Spread.of(event_times_s)
        figures_ms = [round(1e3 * time_s, 4) for time_s in (spread.p50_s, spread.p99_s, max(event_times_s))]
        yield Cost(program.name, gets_first, event, len(event_times_s), *figures_ms)


def _claim(program: Program, costs: list[Cost], *, gets_first: bool) -> Claim:
    any_event = next(cost for cost in costs if cost.event == ANY)
    what = f"{program.name} ({len(program.steps)} calls, {len(program.awaited)} gets), {_order(gets_first)}"
    return Claim(f"CPU time of an event (ms), {what}: 99th percentile", any_event.p99_ms, most=TARGET_MS)


def _order(gets_first: bool) -> str:
    return "gets before calls" if gets_first else "calls before gets"


if __name__ == "__main__":
    sys.exit(main())
