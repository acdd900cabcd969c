"""The comparison's report: a table for people, and JSON with inputs and claims for machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

import msgspec

from plait.gateway.simulation.compare import Experiment, Outcome, Workload

BASELINE = "round_robin"
OURS = "plait"


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure with its target, and whether the target holds in this run. Targets are fixed before any run."""

    name: str
    value: float
    target: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Report:
    """One comparison: its inputs and its outcomes."""

    experiment: Experiment
    workload: Workload
    saturation_per_s: float
    outcomes: tuple[Outcome, ...]
    real_time: bool

    def claims(self) -> Iterator[Claim]:
        """The targets of the policy that ships, against round robin in the same run."""
        by_policy = {outcome.policy: outcome for outcome in self.outcomes}
        base, ours = by_policy.get(BASELINE), by_policy.get(OURS)
        if base is None or ours is None:
            return
        computed = ours.computed_tokens / base.computed_tokens
        yield Claim(f"prompt tokens recomputed, {OURS} / {BASELINE}", computed, "<= 0.5", computed <= 0.5)
        speedup = base.e2e_mean_s / ours.e2e_mean_s
        yield Claim(f"mean E2E, {BASELINE} / {OURS}", speedup, ">= 1.5", speedup >= 1.5)
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
        """The table, with the inputs above it and the claims below."""
        e, w = self.experiment, self.workload
        source = "ToolBench tool lists and LooGLE documents" if e.traces else "built-in manuals and tool catalogues"
        head = (
            f"{e.calls} calls on {w.prefixes} shared prefixes ({source}), Zipf {e.zipf}, seed {e.seed}\n"
            f"{e.engines} engines, {e.profile}, KV cache of {w.kv_tokens:,} tokens each; working set "
            f"{w.working_set_tokens:,} tokens ({w.working_set_tokens / w.kv_tokens:.2f} x one KV cache)\n"
            f"{e.rate * self.saturation_per_s:.1f} calls/s, {e.rate:g} of round robin's saturation "
            f"({self.saturation_per_s:.1f} calls/s), {'real servers' if self.real_time else 'virtual time'}\n"
        )
        claims = [
            f"{'holds' if claim.holds else 'FAILS'}: {claim.name} = {claim.value:.3f}, wanted {claim.target}"
            for claim in self.claims()
        ]
        return "\n".join((head, *_table(self.outcomes), "", *claims))


ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("prompt tokens", lambda o: f"{o.prompt_tokens:,}"),
    ("  recomputed", lambda o: f"{o.computed_tokens:,}"),
    ("  hit rate", lambda o: f"{o.hit_rate:.1%}"),
    ("  predicted hit rate", lambda o: f"{o.predicted_hit_rate:.1%}"),
    ("  |predicted - reported|", lambda o: f"{o.misprediction:.2%}"),
    ("TTFT mean", lambda o: f"{o.ttft_mean_s:.3f} s"),
    ("TTFT p99", lambda o: f"{o.ttft_p99_s:.3f} s"),
    ("E2E mean", lambda o: f"{o.e2e_mean_s:.3f} s"),
    ("E2E p99", lambda o: f"{o.e2e_p99_s:.3f} s"),
    ("calls per engine", lambda o: " ".join(str(calls) for calls in o.calls_per_engine.values())),
)


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    cells = [["", *(outcome.policy for outcome in outcomes)]]
    cells += [[label, *(show(outcome) for outcome in outcomes)] for label, show in ROWS]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield row[0].ljust(widths[0]) + "".join(
            f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)
        )
