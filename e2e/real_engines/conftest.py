"""Real servers for the tests of this folder, which run for one kind of engine: `make e2e-vllm`, `make e2e-sglang`.

Engines come in pairs. The first, a stock one and one whose levers are pulled by force, only answers what `reference`
holds, and stops. The second is the fleet that nearly everything is asserted of. Beside it, while it rests, run those of
`test_other_engines`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from openai import OpenAI

from e2e.installed import clashing_folder, copied_environment
from e2e.real_engines.engine import EngineKind, started
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.reference import FORCED_LEVERS, FORCED_SCHEDULER, Reference, collect_reference
from e2e.sdk import sync_client
from e2e.sglang import engines as sglang
from e2e.tiny_model import tiny_model
from e2e.traces import ABSENT, TRACES
from e2e.vllm import engines as vllm
from tests.waiting import WITHIN_S

PYTHON_VARIABLE: Final = "PLAIT_ENGINE_PYTHON"
"""Names the Python of the environment that the engine is installed in (see `environment.py`)."""
KIND_VARIABLE: Final = "PLAIT_ENGINE_KIND"
"""`vllm` or `sglang`."""
KINDS: Final = {kind.name: kind for kind in (vllm.KIND, sglang.KIND)}

if PYTHON_VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]

_FINDINGS: Final = pytest.StashKey[Findings]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FINDINGS] = Findings(os.environ.get(KIND_VARIABLE, "vllm"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    findings = config.stash[_FINDINGS]
    findings.write()
    if findings.claims:
        terminalreporter.section("real engines")
        for line in findings.lines():
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def findings(pytestconfig: pytest.Config) -> Findings:
    """Takes what tests measure."""
    return pytestconfig.stash[_FINDINGS]


@pytest.fixture(scope="session")
def kind() -> EngineKind:
    """The kind of engine that the tests run on."""
    return KINDS[os.environ.get(KIND_VARIABLE, "vllm")]  # type: ignore[index]


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python that the engine is installed for."""
    if PYTHON_VARIABLE not in os.environ:
        pytest.fail(f"{PYTHON_VARIABLE} is not set: run `make e2e-vllm` or `make e2e-sglang`")
    return Path(os.environ[PYTHON_VARIABLE]).absolute()


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of the model that the engines serve."""
    return tiny_model()


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of data sets; tests that need it are skipped without."""
    if not TRACES.is_dir():
        pytest.skip(ABSENT)
    return TRACES


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the servers' logs and configurations."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def reference(
    kind: EngineKind, python: Path, model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    """What a stock engine and one with forced levers did; both have stopped.

    The second has Plait from its wheel, and is started in a folder with a user's modules of our folders' names.
    """
    stock = kind.stock("stock", python, model, folder)
    clashing = clashing_folder(tmp_path_factory.mktemp("clashing"))
    copied = copied_environment(python, clashing / "environment")
    options = ("--scheduler", FORCED_SCHEDULER)
    forced = kind.plait("forced", copied, model, clashing, scheduler_options=FORCED_LEVERS, options=options)
    with started((stock, forced)):
        return collect_reference(stock, forced, kind.long_tokens)


@pytest.fixture(scope="session")
def fleet(kind: EngineKind, reference: Reference, python: Path, model: Path, folder: Path) -> Iterator[EngineFleet]:
    """Two engines with Plait inside and a gateway before them; only once the engines of `reference` have stopped."""
    names = ("engine-1", "engine-2")
    engines = {name: kind.plait(name, python, model, folder, flags=kind.log_steps) for name in names}
    fleet = EngineFleet(new_gateway("gateway", engines, model, folder), engines)
    with ExitStack() as stack:
        fleet.start(stack)
        yield fleet


@pytest.fixture
def client(fleet: EngineFleet) -> Iterator[OpenAI]:
    """The SDK on the gateway."""
    with sync_client(fleet.gateway, timeout=WITHIN_S) as client:
        yield client
