"""The plots of docs/results.md: what each draws of which stored report, and the sentence above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from benchmarks.curves import LOADS, SIZES, TIERED
from benchmarks.filling.promises import LOADS as PROMISED_LOADS
from benchmarks.filling.systems import ADMISSION, FCFS, NONE
from benchmarks.holding.conditions import DEMANDS, FULL, chat_beside
from benchmarks.reporting.drawing import Bars, Line, Lines, Plot, Spans
from benchmarks.reporting.stored import Stored
from plait.lab.simulation.compare import BASELINE, OURS, policy_of

COMPARED_LOAD: Final = 0.85
"""Of README's table."""
PROMISE: Final = "ttft-0.3"
BEYOND: Final = 1.2
SHOWN_SIZE: Final = 2.0
HELD: Final = {"without": "all let through", "capped": "a cap that knows contexts", "held": "plait"}
LINES: Final = {FCFS: "FCFS in the engine", NONE: "order in the engine, no line", ADMISSION: "plait"}
CHAINED: Final = {"throughput": "chained by the client", "plait": "sent as a program"}
ROWS: Final = {"A": "300 bytes", "C": "100 KB, 4 KB new", "P": "24 KB, new", "O": "stream", "S": "paced stream"}
"""The rows of `dataplane` that are drawn."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A plot in its file, of one report. `says` is the sentence above it; the title names the plot."""

    file: str
    title: str
    report: str
    plot: Callable[[Stored], Plot]
    says: Callable[[Stored], str]


def _mean(rows: Sequence[Mapping[str, Any]], figure: str) -> float:
    if not rows:
        raise LookupError(f"no rows with {figure}")
    return fmean(float(row[figure]) for row in rows)


def _load(stored: Stored, policy: str, load: float, figure: str = "e2e_s") -> float:
    return _mean(list(stored.rows("curves", curve="loads", of=policy, load=load)), figure)


def _policies(stored: Stored) -> list[str]:
    return list(dict.fromkeys(row["of"] for row in stored.rows("curves", curve="loads")))


def loads(stored: Stored) -> Lines:
    """Mean E2E over load for the policies."""
    lines = [
        Line(policy_of(name).title, [(load, _load(stored, name, load)) for load in LOADS], name == OURS)
        for name in _policies(stored)
    ]
    return Lines("calls that come, of those that Plait completes", "mean E2E, s", lines, " s")


def _loads_say(stored: Stored) -> str:
    at = {name: _load(stored, name, COMPARED_LOAD) for name in _policies(stored)}
    ours, least = at.pop(OURS), at.pop(BASELINE)
    best = min(at, key=at.__getitem__)
    return (
        f"Calls that share prompts take {ours:.2f} s in the mean with Plait at {COMPARED_LOAD} of the calls that it "
        f"completes, {least:.2f} s with least outstanding calls, and {at[best]:.2f} s with the best of the other "
        f"three, {policy_of(best).title}."
    )


def _agents(stored: Stored, system: str, share: float, figure: str = "chat_ttft_s") -> float:
    return _mean(list(stored.rows("agent_sessions", condition=chat_beside(share), system=system)), figure)


def agents(stored: Stored) -> Lines:
    """Chat beside agents over KV demand."""
    lines = [
        Line(title, [(share, _agents(stored, system, share)) for share in DEMANDS], system == "held")
        for system, title in HELD.items()
    ]
    return Lines("contexts of the agents' sessions, over the KV", "mean TTFT of chat, s", lines, " s")


def chat_ttft_s(stored: Stored, system: str) -> float:
    """The mean TTFT of chat beside agents whose contexts exceed the KV."""
    return _agents(stored, system, FULL)


def _agents_say(stored: Stored) -> str:
    systems = ("held", "without", "capped")
    chat = [chat_ttft_s(stored, system) for system in systems]
    sessions = [_agents(stored, system, FULL, "session_s") for system in systems]
    return (
        f"Beside agents whose contexts take {FULL} times the KV, chat has its first token after {chat[0]:.2f} s, "
        f"{chat[1]:.2f} s if all sessions are let through, and {chat[2]:.2f} s with a cap on sessions that knows their "
        f"contexts beforehand; the sessions take {sessions[0]:,.0f}, {sessions[1]:,.0f} and {sessions[2]:,.0f} s."
    )


def _promised(stored: Stored, system: str, load: float, figure: str = "kept") -> float:
    return _mean(list(stored.rows("full_fleet", promise=PROMISE, callers="one", system=system, load=load)), figure)


def promises(stored: Stored) -> Lines:
    """Promises kept over load."""
    lines = [
        Line(title, [(load, 100 * _promised(stored, system, load)) for load in PROMISED_LOADS], system == ADMISSION)
        for system, title in LINES.items()
    ]
    return Lines("calls that come, of those that the engine completes", "promises kept, %", lines, " %", most=104)


def _promises_say(stored: Stored) -> str:
    fcfs, none, ours = (100 * _promised(stored, system, BEYOND) for system in LINES)
    calls = _promised(stored, ADMISSION, BEYOND, "completed_per_s") / _promised(stored, FCFS, BEYOND, "completed_per_s")
    return (
        f"At {BEYOND} of what an engine completes, {ours:.0f} % of the short calls beside prompts of 8,600 tokens have "
        f"their first token within .3 s, {none:.0f} % with the order in the engine alone and {fcfs:.0f} % with FCFS, "
        f"at {calls:.2f} of FCFS's calls/s."
    )


def timeline(stored: Stored) -> Spans:
    """A program's calls beside the same that its client chains."""
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    ends = {}
    for system, title in CHAINED.items():
        found = list(stored.rows("curves", curve="timeline", of=system))
        calls = [row for row in found if "began_s" in row]
        rows[title] = {
            "prompt": [(row["arrived_s"], row["first_token_s"]) for row in calls],
            "answer": [(row["first_token_s"], row["ended_s"]) for row in calls],
        }
        ends[title] = max(row["ended_s"] for row in found)
    return Spans("time from the client's start, s", rows, ends)


def _timeline_says(stored: Stored) -> str:
    plot = timeline(stored)
    client, program = (plot.ends[title] for title in CHAINED.values())
    calls = len(plot.rows[CHAINED["plait"]]["prompt"])
    return (
        f"A chain of {calls} calls takes {client:.1f} s if its client waits for each answer over a network of 250 ms, "
        f"and {program:.1f} s if it is sent as a program; it gains nothing where the network has no delay."
    )


def _tier(stored: Stored, workload: str, size: float, figure: str) -> float:
    return _mean(list(stored.rows("curves", curve="tiers", of=workload, size=size)), figure)


def tiers(stored: Stored) -> Lines:
    """Hit rate over the size of the KV tier."""
    lines = [Line(name, [(size, _tier(stored, name, size, "hit_rate")) for size in SIZES]) for name in TIERED]
    return Lines("KV tier in host memory, over the engine's own KV", "hit rate", lines, most=1.0)


def _tiers_say(stored: Stored) -> str:
    gains = [_tier(stored, name, SHOWN_SIZE, "e2e_s") / _tier(stored, name, 0.0, "e2e_s") for name in TIERED]
    rates = (
        f"{name} {_tier(stored, name, 0.0, 'hit_rate'):.2f} to {_tier(stored, name, SHOWN_SIZE, 'hit_rate'):.2f}"
        for name in TIERED
    )
    return (
        f"A KV tier in host memory of {SHOWN_SIZE:g} times the engine's KV raises hit rates ({', '.join(rates)}), and "
        f"the mean E2E is {', '.join(f'{gain:.2f}' for gain in gains)} of that without."
    )


def _cpu_ms(stored: Stored) -> dict[str, list[float]]:
    """Of each router that is drawn, in the order of the rows."""
    return {
        row["router"].removesuffix(", cache aware"): [1e3 * min(row["cpu_s"][name]) for name in ROWS]
        for row in stored.rows("dataplane")
        if row["router"] == OURS or row["router"].endswith(", cache aware")
    }


def data_path(stored: Stored) -> Bars:
    """CPU time of a call beside other routers."""
    return Bars("CPU time of a call, ms", list(ROWS.values()), _cpu_ms(stored), OURS, " ms")


def _data_path_says(stored: Stored) -> str:
    found = _cpu_ms(stored)
    ours = found.pop(OURS)
    over = [mine / min(other[number] for other in found.values()) for number, mine in enumerate(ours)]
    dearest, cheapest = (list(ROWS.values())[over.index(end(over))] for end in (max, min))
    return (
        f"A call costs Plait {min(ours):.2f} to {max(ours):.1f} ms of CPU time, from {min(over):.1f} ({cheapest}) to "
        f"{max(over):.1f} times ({dearest}) that of the cheapest of three routers in Rust, which tokenize no prompt."
    )


SHOWN: Final = (
    Shown("loads.svg", "Mean E2E over load, by policy", "curves", loads, _loads_say),
    Shown("agents.svg", "Chat beside agents, over KV demand", "agent_sessions", agents, _agents_say),
    Shown("promises.svg", "Promises kept, over load", "full_fleet", promises, _promises_say),
    Shown("timeline.svg", "A program, and its calls chained", "curves", timeline, _timeline_says),
    Shown("tiers.svg", "Hit rate, over the size of the KV tier", "curves", tiers, _tiers_say),
    Shown("cpu.svg", "CPU time of a call, by router", "dataplane", data_path, _data_path_says),
)
