"""The table of what is claimed: every row can be made, runs by its own runner, and fails aloud."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from benchmarks import mission
from benchmarks.application.experiments import EXPERIMENTS
from benchmarks.application.figures import Figures
from benchmarks.application.sweep import Point
from benchmarks.claiming import placement, programs, room
from benchmarks.claiming.documents import document_claims
from benchmarks.claiming.rows import IN_TURN, Found, Row, Size, in_turn, rows, with_parts
from benchmarks.filling import runs as filling
from benchmarks.placing import held_cells
from benchmarks.placing import policy_runs as placing
from plait.lab.simulation.claim import Claim
from tests.source_tree import ROOT


def test_a_quick_row_has_fewer_tasks() -> None:
    quick, full = rows(quick=True), rows(quick=False)
    assert list(quick) == list(full)
    for name, row in quick.items():
        assert 0 < len(row.tasks) <= len(full[name].tasks), name
        assert len(set(row.tasks)) == len(row.tasks), name


def test_each_row_is_run_in_all_turns_or_in_one() -> None:
    whole = rows(quick=True)
    turns = [in_turn(whole, turn) for turn in range(7, 7 + len(IN_TURN))]
    counts = Counter(name for names in turns for name in names)
    assert counts.keys() == whole.keys()
    assert set(counts.values()) == {1, len(IN_TURN)}


def test_the_nightly_parts_run_each_task_once() -> None:
    made = subprocess.run(["make", "--silent", "nightly-parts"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = [part.removeprefix("mission-") for part in made.stdout.split() if part.startswith("mission-")]
    whole = rows(quick=False)
    known = with_parts(whole)
    ran = [task for name in named for task in known[name].tasks]
    assert len(ran) == sum(len(row.tasks) for row in whole.values())
    for name, row in whole.items():
        assert set(row.tasks) == {
            task for of in named if of == name or of.startswith(f"{name}-") for task in known[of].tasks
        }


def claims(found: Found) -> Iterator[Claim]:
    total = sum(found.values())
    yield Claim("the sum", total, least=12)


def table(numbers: list[int]) -> dict[str, Row]:
    return {
        "sum": Row(numbers, lambda _traces: lambda number: 2 * number, claims, seed_of=str),
        "absent": Row([1], lambda _traces: lambda number: number, claims, ["no_such_file"]),
    }


@pytest.mark.parametrize(("numbers", "status"), [([1, 2, 3], 0), ([1, 2], 1)])
def test_a_row_that_fails_is_an_error(
    numbers: list[int],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(mission, "rows", lambda **_: table(numbers))
    options = ["--jobs", "1", "--traces", str(tmp_path), "--json", str(report)]
    monkeypatch.setattr(sys, "argv", ["mission", *options])
    assert mission.main() == status
    assert [(row["row"], row["value"], row["holds"]) for row in json.loads(report.read_text())["results"]] == [
        ("sum", 2 * sum(numbers), not status)
    ]
    printed = capsys.readouterr().out
    assert "skipped: absent" in printed
    assert ("FAILS: sum: the sum" in printed) is bool(status)


def figures(e2e_s: float) -> placing.Figures:
    return placing.Figures(
        ttft_s=1.0, ttft_p99_s=2.0, e2e_s=e2e_s, e2e_p99_s=9.0, completed_per_s=3.0, hit_rate=0.8, largest_share=0.3,
        refused=0,
    )  # fmt: skip


def test_placement_is_compared_with_round_robin_and_the_best_rival() -> None:
    rivals = dict.fromkeys(placement.RIVALS, figures(9.0))
    by_policy = {**rivals, "plait": figures(2.0), "round_robin": figures(5.0), "smg": figures(1.9)}
    behind = {**by_policy, "lmetric": figures(1.6)}
    found = {
        placing.Task("video", 4, 100): {placing.AT_ONCE: behind, "0.9 round_robin": by_policy, "0.95 best": behind}
    }
    best = "mean E2E, the best of 6 rivals / plait, video"
    assert [(claim.name, claim.holds) for claim in placement.placement_claims(found)] == [
        ("mean E2E, round_robin / plait, video, 0.9 round_robin", True),
        (f"{best}, 0.9 round_robin (smg)", True),
        (f"{best}, 0.95 best (lmetric)", False),
        ("mean E2E, the best of 6 rivals at each load / plait, geometric mean", False),
    ]


@pytest.mark.parametrize("cell", [held_cells.ROOM, held_cells.SMALL_ROOM])
def test_documents_with_room_are_compared_with_each_rival_seed_by_seed(cell: str) -> None:
    e2e_s = {"plait": (2.0, 3.0), "smg": (4.0, 6.0), "lmetric": (1.0, 3.0)}
    found = {
        held_cells.Task(cell, 200 + place, policy): figures(seconds)
        for policy, by_seed in e2e_s.items()
        for place, seconds in enumerate(by_seed)
    }
    smg, lmetric = room.room_claims(found)
    assert smg.value == pytest.approx(2.0)
    assert lmetric.value == pytest.approx(0.5**0.5)
    assert smg.holds
    assert lmetric.fails


def test_a_claim_shows_what_each_seed_gives_and_the_mean_decides() -> None:
    def made(found: Found) -> Iterator[Claim]:
        values = [*found.values()]
        yield Claim(f"mean (at {max(values)})", sum(values) / len(values), most=2.0)
        if len(values) > 1:
            yield Claim("of all seeds only", 1.0)

    row = Row([(1, "a"), (2, "a")], lambda _traces: str, made, seed_of=itemgetter(0))
    mean, whole = row.claims_by_seed({(1, "a"): 1.5, (2, "a"): 2.5})
    assert (mean.value, mean.by_seed, mean.holds) == (2.0, (1.5, 2.5), True)
    assert str(mean) == "holds: mean (at 2.5) = 2.000 (1.500 to 2.500 by seed), wanted <= 2"
    assert whole.by_seed == ()


@pytest.mark.parametrize("quick", [True, False])
def test_each_claim_is_of_three_seeds_and_later_ones_are_others(*, quick: bool) -> None:
    reported, later = rows(quick=quick), rows(quick=quick, later=50)
    for name, row in reported.items():
        seeds = {row.seed_of(task) for task in row.tasks}
        assert len(seeds) >= 3, name
        assert len(later[name].tasks) == len(row.tasks)
        assert not seeds & {later[name].seed_of(task) for task in later[name].tasks}, name


def test_documents_are_compared_at_each_load_but_all_at_once() -> None:
    ours = {0.75: (1.04, 1.0), 0.95: (1.06, 1.0), 1.5: (9.0, 0.96), filling.AT_ONCE: (9.0, 0.5)}
    found = {
        filling.Point("documents", load, system, 11): filling.Figures(
            calls=9, rate_per_s=1.0, refused_calls=0, ttft_mean_s=times, ttft_p99_s=9.0, ttft_longest_s=9.0,
            e2e_mean_s=times, hit_rate=0.9, completed_per_s=completed_per_s, timely_per_s=1.0,
        )
        for load, of_ours in ours.items()
        for system, (times, completed_per_s) in {
            "none": (1.0, 1.0), "round_robin": (2.0, 0.9), "admission": of_ours,
        }.items()
    }  # fmt: skip
    assert [claim.holds for claim in document_claims(found)] == [True, True, False, False, True]


def test_programs_are_compared_with_each_system_over_their_kinds() -> None:
    """In the mixes, a system that is better for chat and worse for the map-reduces is not better."""

    def latency_s(system: str, kind: str) -> float:
        return {("plait", "chat"): 5.5, ("client_e2", "map_reduce"): 7.0, ("client_plait", "map_reduce"): 4.5}.get(
            (system, kind), 5.0
        )

    found = {
        (case, system, seeds): {
            Point(case, system, kind): program_figures(latency_s(system, kind))
            for kind in EXPERIMENTS[case.experiment].kinds
        }
        for case, system, seeds in programs.tasks(Size(quick=True).seeds, quick=True)
    }
    made = {claim.name: claim.value for claim in programs.claims(found, quick=True)}
    mix = "latency_mix (shared_tokens 6000): map_reduce and chat, client_plait / plait"
    assert made[mix] == pytest.approx((4.5 / 5.0 * 5.0 / 5.5) ** 0.5)
    assert made["chains (applications 25): chain, latency / plait"] == 1.0


def program_figures(latency_s: float) -> Figures:
    return Figures(
        jobs=1, latency_s=latency_s, latency_p90_s=9.0, normalised_s=latency_s, token_s=0.1, hit_rate=0.5,
        breakdown={}, latencies_s=(latency_s,),
    )  # fmt: skip
