"""The figures of the three papers, and where each is among the stored reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.placing.policy_runs import BASE, OURS
from benchmarks.placing.preble_workloads import WORKLOADS
from benchmarks.placing.published_report import RIVALS as PUBLISHED_RIVALS
from benchmarks.preble import MIX, PAPER, RIVALS
from benchmarks.reporting.figures import Figure, Values
from benchmarks.reporting.stored import Stored
from benchmarks.schedulers import claims as scheduler

APPLICATIONS: Final = "applications"
SCHEDULER: Final = "local_scheduler"
AS_PUBLISHED: Final = "preble_published"
SLO: Final = "slo"
BEYOND: Final = "over the baselines beyond their knee"
FCFS: Final = ("fcfs_512", "fcfs_2048")
GOODPUT: Final = "goodput_calls_s"
BY_RATE: Final = {"figure": "rate", "tpot": "range"}


def _claims(report: str, *contain: str) -> Values:
    """The values of the claims whose names contain one of these."""

    def values(stored: Stored) -> Sequence[float]:
        return [float(claim["value"]) for text in contain for claim in stored.claims(report, text)]

    return values


def _parrot(name: str) -> Values:
    return lambda stored: [stored.value(APPLICATIONS, name)]


def _never_worse(experiment: str) -> Values:
    return _parrot(f"{experiment}: times the better baseline, at the worst point")


def _preble(workload: str) -> Figure:
    by = "" if workload == MIX else ", our generator by table 1"
    return Figure(
        number="4" if workload == MIX else "3",
        what=f"{workload}{by}: round robin's mean E2E over ours, at the load that gains most",
        least=None if workload == MIX else PAPER[workload],
        published=PUBLISHED.get(workload, "1.5 to 14.5"),
        ours=_gains("preble", workload),
        rival=_rivals("preble", RIVALS[1:], workload),
        why=SMALLER.get(workload, ""),
    )


def _published(workload: str) -> Figure:
    """With the sets, the order and the rates of the paper's code."""
    return Figure(
        number="3",
        what=f"{workload}, as published: round robin's mean E2E over ours, at the load that gains most",
        least=PAPER[workload],
        published=PUBLISHED.get(workload, "1.5 to 14.5"),
        ours=_gains(AS_PUBLISHED, workload),
        rival=_rivals(AS_PUBLISHED, PUBLISHED_RIVALS[1:], workload),
    )


def _gains(report: str, workload: str) -> Values:
    def values(stored: Stored) -> Sequence[float]:
        claims = stored.claims(report, f"mean E2E, {BASE} / {OURS}")
        return [float(claim["value"]) for claim in claims if claim["name"].startswith(f"{workload}, ")]

    return values


def _rivals(report: str, rivals: Sequence[str], workload: str) -> Values:
    """The least of the rivals on each machine."""

    def values(stored: Stored) -> Sequence[float]:
        by_machine: dict[str, list[float]] = {}
        for rival in rivals:
            for claim in stored.claims(report, f"mean E2E, {rival} / {OURS}"):
                where, _, _ = claim["name"].partition(":")
                if where.startswith(f"{workload}, "):
                    by_machine.setdefault(where, []).append(float(claim["value"]))
        return [min(found) for found in by_machine.values()]

    return values


def _step(step: str, before: str) -> Values:
    return lambda stored: [stored.value("ablation", f"{step}: E2E over {before}")]


def _lost_with(system: str) -> Values:
    """How much less the goodput of a variant is, as a share; over the rates at which it ran."""

    def values(stored: Stored) -> Sequence[float]:
        rates = {row["rate_per_s"]: float(row[GOODPUT]) for row in stored.rows(SCHEDULER, system=system, **BY_RATE)}
        whole = [
            float(row[GOODPUT]) for row in stored.rows(SCHEDULER, system=SLO, **BY_RATE) if row["rate_per_s"] in rates
        ]
        return [1 - sum(rates.values()) / sum(whole)] if rates else []

    return values


def _accelgen(number: str, name: str, rival: Values | None = None, why: str = "") -> Figure:
    least, most = scheduler.PUBLISHED[name]
    ours = _claims(SCHEDULER, f"{name}: ")
    return Figure(number=number, what=f"{name}, {BEYOND}", least=least, most=most, ours=ours, rival=rival, why=why)


def _over_fcfs(figure: str, **match: float) -> Values:
    """Goodput over the better FCFS budget, at each load of a figure where that has any."""

    def values(stored: Stored) -> Sequence[float]:
        found = []
        for row in stored.rows(SCHEDULER, system=SLO, figure=figure, **match):
            load = {"rate_per_s": row["rate_per_s"], "long_share": row["long_share"], "figure": figure}
            best = max(float(other[GOODPUT]) for name in FCFS for other in stored.rows(SCHEDULER, system=name, **load))
            found += [float(row[GOODPUT]) / best] if best else []
        return found

    return values


def _utilisation(stored: Stored) -> Sequence[float]:
    """How much more of the pivot forward size iterations have than under each baseline, at the highest common load."""
    rate = max(float(row["rate_per_s"]) for row in stored.rows(SCHEDULER, system=SLO, **BY_RATE))
    rows = list(stored.rows(SCHEDULER, rate_per_s=rate, **BY_RATE))
    ours = next(float(row["compute_utilisation"]) for row in rows if row["system"] == SLO)
    return [ours / float(row["compute_utilisation"]) - 1 for row in rows if row["kind"] == "baseline"]


PUBLISHED: Final = {"programming": "1.56 to 1.8", MIX: "drawn only"}
SMALLER: Final[Mapping[str, str]] = {
    "programming": "Ten programs for each problem, at once. As published, a fixed set of problems, in any order.",
    "embodied agents": "Few games are alive at a time, behind one beginning. As published, 100 an engine.",
}
"""What differs in our generators."""

PREBLE: Final = (
    *map(_published, WORKLOADS),
    *map(_preble, (*WORKLOADS, MIX)),
    Figure(
        number="5",
        what="E2 over round robin, tool lists by Zipf's law 1.1, mean or p99 E2E",
        published="drawn only",
        ours=_step("+ E2", "round robin"),
        rival=_step("plait", "+ priority groups"),
        why="The rival is E2 with all that the paper adds: what ships is so many times faster.",
    ),
    Figure(
        number="5",
        what="shift and replicas; decode balance; priority groups, each over the step before",
        published="each a gain, drawn only",
        ours=lambda stored: [
            _step("+ shift, replicate", "+ E2")(stored)[0],
            _step("+ decode balance", "+ shift, replicate")(stored)[0],
            _step("+ priority groups", "+ decode balance")(stored)[0],
        ],
        why="What they repair in E2 the sum of delays does not do: it has none of them.",
    ),
    Figure(
        number="4.4",
        what="calls that the global scheduler places a second, tool use and videos, 8 engines",
        least=245,
        most=2931,
        ours=lambda stored: [stored.value("placement", "calls a second, 8 engines")],
        why="One Python process, one core; the slower of the two workloads.",
    ),
)

PARROT: Final = (
    Figure(
        number="11",
        what="a chain of summaries, latency-oriented",
        least=1.38,
        ours=_parrot("chain summary, times faster than the better client-side chaining"),
        rival=_never_worse("chain"),
    ),
    Figure(
        number="12a",
        what="the same beside Parrot's background calls, latency-oriented",
        least=2.38,
        ours=_parrot("chain summary beside Parrot's background calls, times faster than latency-oriented"),
        rival=_never_worse("background_parrot"),
        why="The engine hardly queues: the rest of the gain is the network, 5.2 of 40 s.",
    ),
    Figure(
        number="12a",
        what="the same beside Azure's chat calls, latency-oriented",
        least=2.38,
        ours=_parrot("chain summary beside background calls, times faster than latency-oriented"),
        rival=_parrot("chain summary beside background calls, times faster than the better baseline"),
        why="At 4,096 running tokens the baseline's queue grows through the run. The rival's engines hardly queue.",
    ),
    Figure(
        number="12a",
        what="both, the better baseline",
        least=2.38,
        ours=_claims(
            APPLICATIONS,
            "chain summary beside background calls, times faster than the better",
            "background_parrot: times the better baseline",
        ),
        why="What is left is the network and longer iterations. 2.38 would take an engine without the other calls.",
    ),
    Figure(
        number="12b",
        what="25 chains at once, the better baseline",
        least=1.68,
        ours=_parrot("chain summaries at once, times faster than the better baseline"),
        why="All chains fit into the KV cache and decode together: decoding is 84 of 97 s.",
    ),
    Figure(
        number="12b",
        what="25 chains at once, latency-oriented",
        least=1.68,
        ours=_parrot("chain summaries at once, times faster than latency-oriented"),
        rival=_parrot("chain summaries at once, times faster than the better baseline"),
    ),
    Figure(
        number="13",
        what="the chain that gains least, against the better baseline",
        least=1.0,
        ours=_parrot("chains: times faster, the chain that gains least"),
        why="40 ms a token let some 12 chains run; without that limit all 25 gain, and the mean is 95 instead of 84 s.",
    ),
    Figure(
        number="14",
        what="map-reduce, latency-oriented",
        least=2.37,
        ours=_parrot("map-reduce summary, times faster than latency-oriented"),
        rival=_never_worse("map_reduce"),
    ),
    Figure(
        number="15, 16",
        what="shared prompts in one engine, over paged attention",
        least=1.1,
        most=1.84,
        why="The gain is a kernel's that reads a shared prompt once. Plait runs the engines' own kernels.",
    ),
    Figure(
        number="17",
        what="sustained rate of assistants, over no affinity and no prefix caching",
        least=12.0,
        ours=_parrot("assistants, times the sustained rate without affinity and prefix caching"),
        rival=_parrot("assistants, times the sustained rate without affinity"),
        why="2.4 of the paper's 12 is the kernel. The rival has prefix caching.",
    ),
    Figure(
        number="17",
        what="sustained rate of Parrot's assistants, over no affinity",
        least=4.0,
        ours=_parrot("Parrot's assistants, times the sustained rate without affinity"),
        why="Four prompts fit into every engine's cache. Affinity pays from 16 applications on.",
    ),
    Figure(
        number="17",
        what="the same, over no prefix caching either",
        least=12.0,
        ours=_parrot("Parrot's assistants, times the sustained rate without affinity and prefix caching"),
        rival=_parrot("Parrot's assistants, times the sustained rate without affinity"),
        why="With 490 tokens of output, decoding is 45.6 of 46.0 s at the limit.",
    ),
    Figure(
        number="18",
        what="multi-agent, latency-oriented",
        least=11.7,
        ours=_parrot("multi-agent, times faster than latency-oriented"),
        rival=_parrot("multi-agent, times faster than throughput-oriented"),
        why="At 16 files 237 of 242 s are decoding, at the speed of the engine's memory for both.",
    ),
    Figure(
        number="18",
        what="multi-agent, throughput-oriented",
        least=2.45,
        ours=_parrot("multi-agent, times faster than throughput-oriented"),
        why="2.35 of it is sharing that the paper's baseline cannot do. Engines' prefix caches do it since.",
    ),
    Figure(
        number="18",
        what="multi-agent, throughput-oriented without prefix caching",
        least=2.45,
        ours=_parrot("multi-agent, times faster than throughput-oriented without prefix caching"),
        why="Computing all prompts anew is 112 of 354 s here. The paper's baseline also runs out of KV cache.",
    ),
    Figure(
        number="19",
        what="chat beside map-reduces, latency- and throughput-oriented",
        least=1.23,
        most=5.5,
        ours=_claims(APPLICATIONS, "chat beside map-reduce"),
        rival=_never_worse("chat_mix"),
    ),
    Figure(
        number="19",
        what="the map-reduces, latency- and throughput-oriented",
        least=1.05,
        most=3.7,
        ours=_claims(APPLICATIONS, "map-reduce beside chat"),
    ),
)

ACCELGEN: Final = (
    Figure(
        number="3, 4, 5",
        what="what FCFS systems do: utilisation, iterations in time, by token budget",
        why="In the command's tables (compute, KV, iterations met) for Orca, FastGen and four FCFS budgets; not drawn.",
    ),
    Figure(
        number="6",
        what="goodput that is lost if any number of long prompts may start",
        published="drawn only",
        no_gain=0.0,
        ours=_lost_with("slo_any_long"),
    ),
    Figure(
        number="7, 12",
        what="goodput that is lost without the order by remaining time",
        least=0.52,
        ours=_lost_with("slo_without_order"),
    ),
    Figure(
        number="12",
        what="the same without SLO-guaranteed chunks",
        least=0.44,
        ours=_lost_with("slo_without_chunk"),
    ),
    Figure(
        number="12",
        what="the same without filling batches by compute and KV",
        least=0.27,
        ours=_lost_with("slo_without_batch"),
        why="Iterations have 3 to 4 % of the pivot's tokens in the mean: the KV runs out long before compute does.",
    ),
    _accelgen(
        "11a",
        scheduler.THROUGHPUT,
        rival=_claims(SCHEDULER, "share of the throughput of FCFS"),
        why="The most is over Orca with 8,192 tokens reserved for each call. The rival is the best FCFS budget.",
    ),
    _accelgen(
        "11b",
        scheduler.GOODPUT,
        rival=_claims(SCHEDULER, "share of the goodput of the best clairvoyant"),
        why="Baselines keep almost no TTFT there, so the factor has no end. The rival knows each output in advance.",
    ),
    _accelgen(
        "11c",
        scheduler.ITERATIONS,
        why="Above .96 under every baseline: the KV limits batches, and TPOTs are 141 to 234 ms.",
    ),
    _accelgen("11c", scheduler.CALLS, why="The paper has iterations only. The baselines meet hardly any TTFT there."),
    _accelgen("11d", scheduler.JCT),
    Figure(
        number="11e",
        what="GPU compute utilisation, gain over each baseline at the highest rate",
        least=0.31,
        most=0.63,
        ours=_utilisation,
        why="Beyond saturation FCFS fills its iterations, too; what they serve is late.",
    ),
    Figure(
        number="11f",
        what="time of a decision",
        why="CPU time, so not in a table that is written again: `python -m benchmarks plan_cost`.",
    ),
    Figure(
        number="13",
        what="goodput over the better FCFS, by the share of long prompts",
        published="drawn only",
        ours=_over_fcfs("share"),
    ),
    Figure(
        number="14",
        what="goodput over the better FCFS, short prompts alone",
        least=1.41,
        most=19.0,
        ours=_over_fcfs("alone", long_share=0.0),
    ),
    Figure(
        number="14",
        what="goodput over the better FCFS, long prompts alone",
        least=2.57,
        most=33.0,
        ours=_over_fcfs("alone", long_share=1.0),
    ),
)

PAPERS: Final = {"Preble": PREBLE, "Parrot": PARROT, "AccelGen": ACCELGEN}
