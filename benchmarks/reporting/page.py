"""docs/results.md: what users ask first, the plots, and what does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from benchmarks.reporting.drawing import svg
from benchmarks.reporting.figures import Verdict
from benchmarks.reporting.papers import PAPERS
from benchmarks.reporting.plots import SHOWN
from benchmarks.reporting.stored import Stored
from benchmarks.reporting.tried import tried
from benchmarks.running.report import table

IMAGES: Final = "images/results"
"""Where the plots are, from the page."""
NOT_REACHED: Final = (Verdict.BEHIND, Verdict.IN_PART)

FIRST: Final = """\
# Results

- **On which hardware?** On none: Plait's own router, lines, programs and schedulers run in virtual time over embedded
  engine cores that plan one iteration ahead, iterations take what [cost profiles](design/cost-model.md) of A6000, A100,
  H100 and H200 say, and CPU times are of the machine that [the reports](measurements/claims.md#the-reports) name.
- **By whom else?** By nobody yet; the command below each plot repeats it, and the same code gives the same figures.
- **How far is that from real engines?** On [one H200](measurements/gpu.md) vLLM had what was predicted in its cache for
  99.5 % of 657 calls, and the profile said .4 % too little for decodes and 46 % for prompts, which had no CUDA graphs;
  on [real servers](design/clocks.md) mean E2E was 2.18 s where virtual time had 2.08, and `plait profile` fits [a CPU
  server](measurements/cost-model.md) within 6 to 7 % in the mean.
- **What is not shown?** More than one GPU, real weights, tensor parallelism, SGLang on a GPU, prefill and decode on
  separate engines, and production traffic; rivals are written down from their code, not run, but for CPU times.
"""
"""The first four of ten sentences. Each plot has another one."""


def page(stored: Stored) -> Iterator[str]:
    """The lines of the page."""
    yield from FIRST.splitlines()
    for shown in SHOWN:
        command = stored.reports[shown.report]["command"]
        alt = f"{shown.title}: {shown.plot(stored).text()}"
        yield from ("", f"## {shown.title}", "", shown.says(stored), "")
        yield from (f"![{alt}]({IMAGES}/{shown.file})", "", f"`{command}`")
    yield from ("", "## What does not hold", "")
    failing, behind = list(_failing(stored)), list(_behind(stored))
    claimed = sum(len(report["claims"]) for report in stored.reports.values())
    yield from (
        f"{len(failing)} of {claimed} [claims](measurements/claims.md) of the reports fall short. Which rows fail",
        "without a mechanism is [listed](measurements/mechanisms.md), and so is what falls short in",
        "[full rows of the mission](measurements/README.md), whose reports are not stored.",
        "",
    )
    yield from table(("report", "claim", "value", "wanted", "off by", "since", "tried"), failing)
    yield from (
        "",
        f"{len(behind)} figures of the papers are not reached, or not in all cases, on other hardware or other data.",
        "",
    )
    yield from table(("paper", "figure", "factor", "paper", "here", "", "why"), behind)


def plots(stored: Stored) -> dict[str, str]:
    """The files of the plots, by name."""
    return {shown.file: svg(shown.plot(stored), escape(shown.title)) for shown in SHOWN}


def _failing(stored: Stored) -> Iterator[list[str]]:
    for report, found in stored.reports.items():
        for claim in found["claims"]:
            if not claim["holds"]:
                name = f"{claim['name']} ({claim['where']})" if claim.get("where") else claim["name"]
                value = "none" if claim["value"] is None else f"{claim['value']:.3f}"
                what = claim.get("excused", "").removeprefix("Measured: ").removesuffix(".")
                notes = "; ".join(filter(None, (what, tried(report, name))))
                yield [
                    f"[{report}](results/{report}.json)", name, value, claim["wanted"], _off_by(claim),
                    claim["since"], notes,
                ]  # fmt: skip


def _off_by(claim: Mapping[str, Any]) -> str:
    """How far the value is from the bound, in the bound."""
    bound = float(claim["wanted"].split()[-1])
    if claim["value"] is None:
        return ""
    return f"{(claim['value'] - bound) / bound:+.1%}".replace("%", " %") if bound else f"{claim['value']:+.3f}"


def _behind(stored: Stored) -> Iterator[list[str]]:
    for paper, figures in PAPERS.items():
        for figure in figures:
            if figure.verdict(stored) in NOT_REACHED:
                number, what, published, ours, _, verdict, why = figure.row(stored)
                yield [paper, number, what, published, ours, verdict, why]
