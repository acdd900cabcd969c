"""The rooms of the package: an import goes down from room to room, and never in a circle."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.source_tree import ROOT, SHIPPED, imports, module_file, path_of, sources

ROOMS = {
    "policy": (
        {"admission"},
        {"batches", "placement", "scheduling", "programs", "sessions"},
        {"costs", "order"},
        {"prefix"},
        {"types"},
    ),
    "backends": (
        {"vllm", "sglang"},
        {"adapter"},
        {"http", "tokenization", "profiles", "translation"},
        {"protocol"},
        {"error_codes", "errors"},
    ),
    "lab": (
        {"commands"},
        {"simulation"},
        {"embedded", "profiling"},
    ),
    "gateway": (
        {"cli"},
        {"commands"},
        {"app"},
        {"guests"},
        {"doors"},
        {"kernel"},
        {"reloading", "server"},
        {"api"},
        {"calls"},
        {"admission", "membership"},
        {"intake"},
        {"answers"},
        {"fleet"},
        {"others"},
        {"asgi", "log", "metrics", "streams", "supervision", "tables", "timer"},
        {"config", "ids", "timed_events"},
    ),
    "gateway/guests": (
        {"account", "durability", "live", "tracing"},
        {"batches", "receipts", "responses"},
        {"discovery", "engines", "forms", "peers", "programs", "translation"},
        {"store"},
    ),
}
"""Each package's rooms and single modules, from the highest floor to the lowest; `client` is one room.

A room imports from the floors below its own, not from beside it. `docs/architecture.md` has the same as a table.
"""


GUESTS = ("gateway", [*ROOMS["gateway"]].index({"guests"}), "guests")


def floor_of(file: Path) -> tuple[str, int, str] | None:
    """Package, floor (the highest is 0) and room of a shipped file; None for a package's own `__init__`."""
    package, *inside = Path(path_of(file)).with_suffix("").parts
    if inside[:1] == ["guests"] and inside[1:] != ["__init__"]:
        package, inside = "gateway/guests", inside[1:]
    if package not in ROOMS or inside == ["__init__"]:
        return None
    floors = [number for number, rooms in enumerate(ROOMS[package]) if inside[0] in rooms]
    assert len(floors) == 1, f"{path_of(file)} is in no room: put {inside[0]} on a floor of {package}"
    return package, floors[0], inside[0]


def imported_files(file: Path) -> set[Path]:
    found = {module_file(name) for name in imports(file) if name.partition(".")[0] in SHIPPED}
    return {imported for imported in found if imported is not None} - {file}


def runs_upwards(file: Path, imported: Path) -> bool:
    here, there = floor_of(file), floor_of(imported)
    if here is None or there is None:
        return False
    if {here[0], there[0]} == {"gateway", "gateway/guests"}:  # the guests together are a room of the gateway
        here, there = (GUESTS if place[0] == "gateway/guests" else place for place in (here, there))
    return here[0] == there[0] and here[2] != there[2] and there[1] <= here[1]


def test_every_room_is_there() -> None:
    rooms = {(package, room) for package, floors in ROOMS.items() for floor in floors for room in floor}
    found = {floor_of(file) for package in ROOMS for file in sources(package)}
    assert {(place[0], place[2]) for place in found if place is not None} == rooms


def table() -> str:
    """The rows of the documents' table."""

    def row(package: str) -> str:
        floors = "; ".join(", ".join(f"`{room}`" for room in sorted(floor)) for floor in ROOMS[package])
        return f"| `{package}/` | {floors} |"

    return "\n".join(row(package) for package in ("lab", "gateway", "gateway/guests", "backends", "policy"))


def test_the_documents_have_the_same_rooms() -> None:
    assert table() in (ROOT / "docs" / "architecture.md").read_text(), f"put this there:\n{table()}"


def test_imports_go_down_from_room_to_room() -> None:
    wrong = [
        f"{path_of(file)} imports {path_of(imported)}"
        for package in ROOMS
        for file in sources(package)
        for imported in imported_files(file)
        if runs_upwards(file, imported)
    ]
    assert not wrong


@pytest.mark.parametrize("package", [*SHIPPED, "e2e", "benchmarks"])
def test_no_import_runs_in_a_circle(package: str) -> None:
    """Those for type checkers alone and those inside functions included."""
    names = {path_of(file): imports(file) for file in sources(package)}
    files = {path: set(filter(None, map(module_file, found))) for path, found in names.items()}
    graph = {path: {path_of(imported) for imported in found} - {path} for path, found in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_an_upward_import_is_found() -> None:
    router, relay, types = (
        next(file for file in sources(package) if path_of(file) == path)
        for package, path in (
            ("gateway", "gateway/fleet/router.py"),
            ("gateway", "gateway/calls/relay.py"),
            ("policy", "policy/types.py"),
        )
    )
    assert runs_upwards(router, relay)
    assert not runs_upwards(relay, router)
    assert not runs_upwards(router, types)
