"""The figures of a run, their medians over the runs of a system, and what they are to show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import nextafter
from statistics import fmean, median

from benchmarks.engine_slo_parts.load import Served
from benchmarks.engine_slo_parts.servers import OURS, STOCK
from plait.lab.simulation.claim import Claim

OBJECTIVE = 3.0
"""The short calls' TTFT objective, in their unloaded TTFTs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run on one system; `load_average` is the machine's when it began (of one minute).

    `output_tokens_s` counts the whole run, from its beginning to its last token, long calls' tokens included.
    """

    system: str
    number: int
    load_average: float
    unloaded_ttft_s: float
    objective_s: float
    attainment: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_max_s: float
    output_tokens_s: float
    duration_s: float
    long_ttft_s: float
    long_e2e_s: float


def figures(system: str, number: int, load_average: float, unloaded_ttft_s: float, served: Sequence[Served]) -> Run:
    """A run's figures from its calls; those of long calls are means."""
    objective_s = OBJECTIVE * unloaded_ttft_s
    ttfts_s = sorted(one.ttft_s for one in served if not one.call.is_long)
    longs = [one for one in served if one.call.is_long]
    duration_s = max(one.last_s for one in served) - min(one.sent_s for one in served)
    return Run(
        system=system,
        number=number,
        load_average=load_average,
        unloaded_ttft_s=unloaded_ttft_s,
        objective_s=objective_s,
        attainment=sum(ttft_s <= objective_s for ttft_s in ttfts_s) / len(ttfts_s),
        ttft_p50_s=median(ttfts_s),
        ttft_p90_s=ttfts_s[int(0.9 * len(ttfts_s))],
        ttft_max_s=ttfts_s[-1],
        output_tokens_s=sum(one.call.output_tokens for one in served) / duration_s,
        duration_s=duration_s,
        long_ttft_s=fmean(one.ttft_s for one in longs),
        long_e2e_s=fmean(one.e2e_s for one in longs),
    )


def medians(runs: Sequence[Run], system: str) -> dict[str, float]:
    """The median of each figure over a system's runs."""
    rows = [asdict(run) for run in runs if run.system == system]
    return {name: median(row[name] for row in rows) for name in rows[0] if name not in {"system", "number"}}


def throughput_ratio(runs: Sequence[Run]) -> float:
    """The median over run numbers of our output tokens per second by the stock server's in the same run."""
    by_run = {(run.system, run.number): run.output_tokens_s for run in runs}
    return median(by_run[OURS, number] / by_run[STOCK, number] for system, number in by_run if system == OURS)


def claims(runs: Sequence[Run]) -> Iterator[Claim]:
    """Fixed targets."""
    ours, stock = (medians(runs, system)["attainment"] for system in (OURS, STOCK))
    yield Claim("TTFT attainment of short calls, slo scheduler, median of the runs", ours, least=0.9)
    yield Claim("TTFT attainment of short calls, stock scheduler, median of the runs", stock, most=nextafter(0.5, 0))
    ratio = throughput_ratio(runs)
    yield Claim("output tokens/s of the whole run, slo / stock, median of the pairs", ratio, least=0.95)
