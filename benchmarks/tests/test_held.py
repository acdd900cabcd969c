"""The cells that placement is held in: games in a closed loop, and what the report says of a few known runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from benchmarks.filling.systems import FleetSize, simulated
from benchmarks.held import Ratio, claims, markdown, over_best
from benchmarks.placing import held_cells
from benchmarks.placing.held_cells import CELLS, MOVES, NAMED, NO_MOVES, RIVALS, SMG_MOVES, Runner, Task
from benchmarks.placing.policy_runs import Figures
from benchmarks.placing.preble_published import GAME_STEPS, play, published_game
from plait.lab.simulation.workload import poisson_arrivals

FIGURES = Figures(1.0, 2.0, 4.0, 9.0, 5.0, 0.5, 0.25, 0)


def slower(times: float) -> Figures:
    return replace(FIGURES, ttft_s=times, ttft_p99_s=2 * times, e2e_s=4 * times)


# Games.


def test_games_share_nothing_and_each_step_has_the_step_before() -> None:
    games = [list(published_game(number, 1)) for number in range(2)]
    assert [len(game) for game in games] == [GAME_STEPS] * 2
    first, second = (game[0].prompt.chain.hashes for game in games)
    assert first[0] != second[0]
    for before, after in pairwise(games[0]):
        shared = len(before.prompt.chain.hashes)
        assert list(after.prompt.chain.hashes[:shared]) == list(before.prompt.chain.hashes)
        assert after.prompt.tokens > before.prompt.tokens + before.output_tokens


@pytest.mark.parametrize("per_s", [2.0, 200.0])
def test_a_game_takes_its_next_step_once_it_has_its_answer(per_s: float) -> None:
    """At 200 calls a second most ticks find no game with an answer, and are made up for."""
    _, simulation = simulated(FleetSize(engines=2), "plait", inf, inf)
    play(simulation, 20, poisson_arrivals(200, per_s, 1), 1)
    records = simulation.records
    assert len(records) == 200
    games = {record.prefix for record in records}
    assert len(games) > 20, "a game that ends is followed by another one"
    for game in games:
        steps = [record for record in records if record.prefix == game]
        assert len(steps) <= GAME_STEPS
        assert all(after.arrived_s >= before.finished_s for before, after in pairwise(steps))


# Runs.


def test_a_run_is_the_same_each_time_for_games_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: replace(CELLS[name], calls=60) for name in ("games 12", "tools 10")}
    monkeypatch.setattr(held_cells, "CELLS", few)
    runner = Runner(Path("no traces"))
    for cell in few:
        for policy in ("plait", "smg"):
            assert runner(Task(cell, 1, policy)) == runner(Task(cell, 1, policy))


def test_moves_are_all_that_differs() -> None:
    for moving, waiting in MOVES:
        assert (NAMED[moving].moves_waiting, NAMED[waiting].moves_waiting) == (True, False)
        assert NAMED[moving].place is NAMED[waiting].place


# The report.


def test_ratios_are_of_runs_with_the_same_seed() -> None:
    ratio = Ratio.of({1: slower(1.0), 2: slower(6.0)}, {1: slower(2.0), 2: slower(3.0), 3: slower(9.0)}, "e2e_s")
    assert (ratio.mean, ratio.least, ratio.most) == pytest.approx((1.0, 0.5, 2.0))


def test_the_best_of_a_cell_is_that_of_the_least_mean_and_moves_are_no_rival() -> None:
    found = {
        "documents 8": {"plait": {1: slower(2.0)}, "lmetric": {1: slower(1.0)}, NO_MOVES: {1: slower(0.1)}},
        "games 12": {
            "plait": {1: slower(1.0)}, "smg": {1: slower(2.0)}, "e2": {1: slower(4.0)}, SMG_MOVES: {1: slower(3.0)},
        },
    }  # fmt: skip
    best = over_best(found, "e2e_s")
    assert {cell: (rival, ratio.mean) for cell, (rival, ratio) in best.items()} == {
        "documents 8": ("lmetric", 2.0),
        "games 12": ("smg", 0.5),
    }
    made = {claim.name: claim for claim in claims(found)}
    assert not [name for name in made if "best" in name], "of some cells, nothing is wanted in the mean"
    assert made["mean E2E, documents 8, plait / lmetric"].fails
    assert made["mean E2E, games 12, plait / smg"].holds
    assert made[f"mean E2E, documents 8, plait / {NO_MOVES}"].value == pytest.approx(20.0)
    assert made[f"mean E2E, games 12, {SMG_MOVES} / smg"].value == pytest.approx(1.5)
    lines = "\n".join(markdown(found))
    assert "| games 12 | 1 | smg | 0.500 (0.50-0.50) |" in lines
    assert f"| games 12 | 1 | ({SMG_MOVES}) smg | 1.500 (1.50-1.50) |" in lines
    assert "| geometric mean | 1.000 | 1.000 | 1.000 |" in lines


def test_over_the_best_of_all_cells() -> None:
    runs = {"plait": {1: slower(2.0)}, **{rival: {1: slower(1.0)} for rival in RIVALS}}
    made = {claim.name: claim for claim in claims(dict.fromkeys(CELLS, runs))}
    assert made["mean E2E over the best rival's, all cells"].value == pytest.approx(2.0)


def test_without_a_rival_nothing_is_said_of_the_best() -> None:
    found = {"tools 10": {"plait": {1: slower(2.0)}, NO_MOVES: {1: slower(2.0)}}}
    assert [claim.name for claim in claims(found)] == [f"mean E2E, tools 10, plait / {NO_MOVES}"]
    assert "best" not in "\n".join(markdown(found))
