"""A test that hangs is ended, explained and named, and the other tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.waiting import SLOWNESS

ROOT = Path(__file__).parents[1]
TESTS = """
import asyncio, contextlib, ctypes, threading

def test_before(): pass

async def test_task():
    await asyncio.create_task(asyncio.Event().wait(), name="the-stuck-task")

async def test_task_that_goes_on():
    async def swallow():
        while True:
            with contextlib.suppress(BaseException):
                await asyncio.sleep(0.01)
    task = asyncio.create_task(swallow())
    await asyncio.Event().wait()

def test_thread():
    stuck = threading.Thread(target=threading.Event().wait, name="the-stuck-thread", daemon=True)
    stuck.start()
    stuck.join()

def test_library():
    ctypes.PyDLL(None).sleep(1000)  # keeps the interpreter's lock, so that no handler of a signal runs

def test_after(): pass
"""
PLUGINS = ("xdist", "pytest_timeout", "pytest_asyncio.plugin", "tests.hangs")


def test_a_hanging_test_ends_alone_with_all_stacks(tmp_path: Path) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-c", str(tmp_path / "pytest.ini"), str(tmp_path), "-n", "1"]
    command += ["--timeout", f"{2 * SLOWNESS:g}", *(part for name in PLUGINS for part in ("-p", name))]
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env = {**others, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert "4 failed, 2 passed" in done.stdout, done.stdout
    for stack in ("name='the-stuck-task'", "in swallow", "thread the-stuck-thread:", "in test_library"):
        assert stack in done.stdout
    *_, task, going_on, thread, library = done.stdout.splitlines()
    for line, name in zip(
        (task, going_on, thread, library), ("task", "task_that_goes_on", "thread", "library"), strict=True
    ):
        assert line.startswith(f"HANGS test_these.py::test_{name}: ")
