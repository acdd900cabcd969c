"""Requests that are generated from `/openapi.json` find no defect: nothing is answered with a server error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from e2e.clients.client import pinned
from e2e.clients.deep_schemas import deepened
from e2e.clients.environment import OPENAI_3
from e2e.clients.matrix import Matrix
from e2e.clients.program_run import KEY, run_tool
from e2e.server_process import Server
from e2e.servers import Fleet

EXAMPLES: Final = 8
"""Random requests for each operation, beside some hundred that try the limits of each field."""
LEAST_CASES: Final = 300
PATHS: Final = {"translating": "^/v1/(responses|messages)"}
"""What is asked where: everything, but for the gateway that differs from another in some routes only."""


WAITING: Final = frozenset(("plait-inputs", "plait-when"))

NIGHTLY: Final = pytest.mark.nightly


@pytest.mark.parametrize(
    "at", ["forwarding", pytest.param("translating", marks=NIGHTLY), pytest.param("engine", marks=NIGHTLY)]
)
def test_no_generated_request_finds_a_defect(at: str, fleets: dict[str, Fleet], matrix: Matrix, tmp_path: Path) -> None:
    fleet = fleets["forwarding" if at == "engine" else at]
    server = fleet.engines["forwarding-1"] if at == "engine" else fleet.gateway
    cases = generated(server, PATHS.get(at, ""), tmp_path)
    assert cases >= LEAST_CASES, "too few to say anything"
    matrix.note(f"schemathesis {pinned(OPENAI_3, 'schemathesis')}, {at}: {cases} cases, no server error.")


def generated(server: Server, paths: str, folder: Path) -> int:
    """How many requests were generated and sent, for the paths that the pattern finds.

    Raises `ProgramError` if one is answered with a server error or not at all.
    """
    command = OPENAI_3.environment.python.with_name("st")
    document = folder / "openapi.json"
    document.write_bytes(msgspec.json.encode(deepened(_without_waits(server.get("/openapi.json").json()), "demo")))
    options = {
        "--url": server.url,
        "--header": f"Authorization: Bearer {KEY}",
        "--checks": "not_a_server_error",
        "--phases": "coverage,fuzzing",
        "--max-examples": str(EXAMPLES),
        "--request-timeout": "15",
        "--seed": "1",
        "--include-path-regex": paths,
    }
    flat = [part for option in options.items() for part in option]
    done = run_tool([str(command), "run", str(document), *flat, "--continue-on-failure", "--no-color"], folder)
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout
    return int(found[1])


def _without_waits(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the headers that make a call wait for a variable which nobody produces."""
    for methods in document["paths"].values():
        for operation in methods.values():
            parameters = operation.get("parameters", [])
            operation["parameters"] = [one for one in parameters if one["name"] not in WAITING]
    return document
