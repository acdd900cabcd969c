"""What calls need imports no guest."""

from __future__ import annotations

from tests.kernel import GUESTS, guests_in_kernel
from tests.source_tree import ROOT, imported_names, module_file, path_of, reached_from, sources

OF_PROGRAMS = ("benchmarks/application/", "benchmarks/claiming/programs.py")
"""The experiments that run programs, by which no other is judged."""

OTHER_ROOMS = ("lab", "backends/translation")
"""What experiments have besides guests: the engines that they emulate, which translate, too."""


def test_the_kernel_imports_no_guest() -> None:
    assert guests_in_kernel() == set()


def test_what_is_claimed_of_a_fleet_holds_without_guests() -> None:
    """All rows of `python -m benchmarks mission` but those of programs run on the kernel: they import no guest."""
    rows = ROOT / "benchmarks" / "claiming" / "rows.py"
    experiments = [file for name in imported_names(rows) if (file := module_file(name.removeprefix("plait.")))]
    experiments = [file for file in experiments if not path_of(file).startswith(OF_PROGRAMS)]
    assert len(experiments) > 15
    reached = map(path_of, reached_from([*experiments, *sources("lab/simulation")]))
    guests = tuple(set(GUESTS) - set(OTHER_ROOMS))
    assert not [path for path in reached if path.startswith(guests)]
