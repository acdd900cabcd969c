"""The archives of a release, as `make dist` leaves them in `dist/`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from e2e.release.environment import SDIST, WHEEL, CheckSize, NewEnvironment


@pytest.fixture(scope="session", autouse=True)
def _is_built() -> None:
    if not (WHEEL.is_file() and SDIST.is_file()):
        pytest.fail("there are no archives of this version: run `make packages` or `make release`")


@pytest.fixture
def check_size(record_property: Callable[[str, object], None]) -> CheckSize:
    """Checks how many megabytes a kind of environment takes, and shows it at the end of the run."""

    def check(kind: str, environment: NewEnvironment, most_mb: int) -> None:
        megabytes = environment.megabytes()
        record_property("size", f"{kind}: {megabytes:.1f} MB in {len(environment.distributions())} packages")
        assert megabytes < most_mb

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    sizes = [value for report in reports for name, value in report.user_properties if name == "size"]
    for line in dict.fromkeys(sizes):
        terminalreporter.write_line(str(line))
