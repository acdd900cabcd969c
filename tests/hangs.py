"""A pytest plugin: a test that hangs fails with the stacks of all threads and tasks, and is named in the last lines.

pytest-timeout knows the bound (`--timeout`, its marker); here it is kept for each phase: setup, call and teardown. A
signal ends the phase, again and again, because whatever its exception first hits may swallow it. Where no handler of a
signal runs, the process ends: pytest-xdist fails the test then, and goes on in another process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator
from typing import Any, Final

import pytest

from tests.waiting import HANGS_S

AGAIN: Final = 0.05
"""The time between two signals, as a part of the bound: a fixture that was interrupted may stop its servers."""
LAST: Final = 0.5
"""The time from the first signal to the end of the process, as a part of the bound."""
BOUND_S: Final = pytest.StashKey[float]()
HANGS: Final = "hangs"
STDERR: Final = os.dup(2)
"""Kept before pytest captures what tests write there."""


def pytest_configure(config: pytest.Config) -> None:
    """Bound each test, unless the command line or the environment does."""
    os.environ.setdefault("PYTEST_TIMEOUT", f"{HANGS_S:g}")
    config.pluginmanager.register(Named())


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Keep the bound, in place of pytest-timeout's own timer, which ends with a test's first failure."""
    item.stash[BOUND_S] = settings.timeout
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    return (yield from bounded(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    return (yield from bounded(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    return (yield from bounded(item))


def bounded(item: pytest.Item) -> Generator[None]:
    """End a phase that lasts too long."""
    bound_s = item.stash.get(BOUND_S, HANGS_S)

    def end(_number: int, _frame: object) -> None:
        reason = f"not over after {bound_s:g} s"
        if HANGS not in dict(item.user_properties):
            item.user_properties.append((HANGS, reason))
            item.add_report_section("hung", "stacks", all_stacks())
        pytest.fail(reason)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, bound_s, AGAIN * bound_s)
    faulthandler.dump_traceback_later((1 + LAST) * bound_s, exit=True, file=STDERR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def all_stacks() -> str:
    """The stacks of all threads and of all tasks of their event loops, the innermost frame last."""
    text = io.StringIO()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        text.write(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    for task in gc.get_objects():  # of every loop, whichever runs
        if issubclass(type(task), asyncio.Task) and not task.done():
            task.print_stack(file=text)
    return text.getvalue()


class Named:
    """Names the tests that hung below all else."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, how in report.user_properties:
            if name == HANGS:
                self._found[report.nodeid] = str(how)
        if "crashed while running" in str(report.longrepr):  # what pytest-xdist says of a process that has ended
            self._found[report.nodeid] = "its process has ended"

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if not hasattr(config, "workerinput"):
            for nodeid, how in self._found.items():
                sys.stdout.write(f"HANGS {nodeid}: {how}\n")
