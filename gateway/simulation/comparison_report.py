"""The comparison's report: a table for people, and JSON with inputs and claims for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Final

import msgspec

from plait.gateway.simulation.compare import OURS, WARM_UP, Experiment, Outcome, Workload
from plait.gateway.simulation.rivals import TITLES

BASELINE: Final = "least_outstanding"


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its target, and whether the target holds in this run. Targets are fixed before any run."""

    name: str
    value: float
    target: str
    holds: bool


COLUMNS: Final[Mapping[str, Callable[[Outcome], str]]] = {
    "hit rate": lambda o: f"{o.hit_rate:.1%}",
    "TTFT mean": lambda o: f"{o.ttft_mean_s:.3f} s",
    "TTFT p99": lambda o: f"{o.ttft_p99_s:.2f} s",
    "E2E mean": lambda o: f"{o.e2e_mean_s:.3f} s",
    "E2E p99": lambda o: f"{o.e2e_p99_s:.2f} s",
    "busiest": lambda o: f"{max(o.calls_per_engine.values()) / o.calls:.0%}",
}
"""Of the table; a row is a policy. `busiest` is the share of the calls that the engine with the most of them got."""

MARKDOWN_ROWS: Final[Mapping[str, Callable[[Outcome], str]]] = {
    "TTFT, mean / p99": lambda o: f"{o.ttft_mean_s:.2f} s / {o.ttft_p99_s:.1f} s",
    "E2E, mean": lambda o: f"{o.e2e_mean_s:.2f} s",
    "prompt tokens recomputed": lambda o: f"{1 - o.hit_rate:.1%}",
}
"""Of the table in Markdown; a column is a policy."""


@dataclass(frozen=True, slots=True)
class Report:
    """One comparison: its inputs and its outcomes."""

    experiment: Experiment
    workload: Workload
    saturation_per_s: float
    outcomes: tuple[Outcome, ...]
    real_time: bool

    def claims(self) -> Iterator[Claim]:
        """The targets of the policy that ships, against the others in the same run."""
        by_policy = {outcome.policy: outcome for outcome in self.outcomes}
        ours, base = by_policy.pop(OURS, None), by_policy.get(BASELINE)
        if ours is None:
            return
        if base is not None:
            computed = ours.computed_tokens / base.computed_tokens
            yield Claim(f"prompt tokens recomputed, {OURS} / {TITLES[BASELINE]}", computed, "<= 0.5", computed <= 0.5)
            gain = base.e2e_mean_s / ours.e2e_mean_s
            yield Claim(f"mean E2E, {TITLES[BASELINE]} / {OURS}", gain, ">= 2", gain >= 2)
        if by_policy:
            gain = min(other.e2e_mean_s for other in by_policy.values()) / ours.e2e_mean_s
            yield Claim(f"mean E2E, the best other / {OURS}", gain, ">= 0.97", gain >= 0.97)
        wrong = ours.misprediction
        yield Claim(f"{OURS}: |predicted - reported cached tokens| / prompt tokens", wrong, "<= 0.02", wrong <= 0.02)

    def json(self) -> bytes:
        """Inputs, outcomes and claims."""
        experiment = {**asdict(self.experiment), "traces": str(self.experiment.traces or "built-in")}
        report = {
            "plait": version("plait"),
            "real_time": self.real_time,
            "experiment": experiment,
            "kv_tokens": self.workload.kv_tokens,
            "working_set_tokens": self.workload.working_set_tokens,
            "shared_prefixes": self.workload.prefixes,
            "saturation_per_s": self.saturation_per_s,
            "rate_per_s": self.experiment.rate * self.saturation_per_s,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
            "claims": [asdict(claim) for claim in self.claims()],
        }
        return msgspec.json.format(msgspec.json.encode(report))

    def text(self) -> str:
        """The table, with the inputs above it and the claims below; at most 100 columns."""
        e, w = self.experiment, self.workload
        source = "ToolBench's tool lists and LooGLE's documents" if e.traces else "manuals and tool lists"
        sessions = sum(1 for _ in w.sessions())
        head = (
            f"{e.calls} calls in {sessions} sessions on {w.prefixes} {source}, Zipf {e.zipf}, seed {e.seed}\n"
            f"{e.engines} engines, {e.profile}, {w.kv_tokens:,} KV tokens each; the shared prefixes have "
            f"{w.working_set_tokens:,}\n"
            f"{e.rate * self.saturation_per_s:.1f} calls/s come, {e.rate:g} of what {OURS} completes if all come at "
            f"once; {'real servers' if self.real_time else 'virtual time'}\n"
            f"the first {WARM_UP:.0%} of the calls fill the caches and do not count\n"
        )
        claims = [
            f"{'holds' if claim.holds else 'FAILS'}: {claim.name} = {claim.value:.3f}, wanted {claim.target}"
            for claim in self.claims()
        ]
        return "\n".join((head, *_table(self.outcomes), "", *claims))

    def markdown(self) -> str:
        """A short table in Markdown."""
        rows = [("", *(TITLES[outcome.policy] for outcome in self.outcomes)), ("---",) * (1 + len(self.outcomes))]
        rows += [(label, *map(show, self.outcomes)) for label, show in MARKDOWN_ROWS.items()]
        return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    cells = [["", *COLUMNS]]
    cells += [[TITLES[outcome.policy], *(show(outcome) for show in COLUMNS.values())] for outcome in outcomes]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield row[0].ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
