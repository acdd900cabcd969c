"""Placement by rank: what is claimed of the figures."""

from __future__ import annotations

from benchmarks.ranks import Cell, Figures, System, Task, cells, claims, markdown


def figures(ours: float, own: float, smg: float) -> dict[System, Figures]:
    return {"by rank": Figures(ours, 0.9), "own balancing": Figures(own, 0.5), "SMG's tree": Figures(smg, 0.9)}


def test_each_way_to_step_has_bounds_of_its_own() -> None:
    found = {
        Task("tools", 1): {
            Cell(1, lockstep=True, load=0.8): figures(1.0, 5.0, 1.1),
            Cell(1, lockstep=True, load=1.5): figures(4.0, 10.0, 3.0),
            Cell(1, lockstep=False, load=0.8): figures(1.0, 3.0, 1.0),
        }
    }
    made = [(claim.where, round(claim.value, 3), claim.holds) for claim in claims(found)]
    assert made == [
        ("lockstep", 0.283, False),
        ("lockstep", 1.101, False),
        ("ranks each by itself", 0.333, True),
        ("ranks each by itself", 1.0, True),
    ]


def test_a_row_for_each_workload_and_cell() -> None:
    by_cell = {cell: figures(1.0, 4.0, 1.0) for cell in cells()}
    found = {Task(workload, seed): by_cell for workload in ("tools", "sessions") for seed in (1, 2)}
    rows = [line for line in markdown(found) if " x " in line and "s |" in line]
    assert len(rows) >= 2 * len(by_cell)
    assert "| tools, 2 x 4, each by itself, 1.5 | 1.00 s | 0.25 | 1.00 | 0.900 / 0.500 / 0.900 |" in rows
