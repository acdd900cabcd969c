"""`plait demo` and `plait live` in a pseudo-terminal, and as lines where there is no terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import pytest

from e2e.demo import refused
from e2e.ports import free_ports
from e2e.server_process import DEADLINE_S, PLAIT, eventually
from e2e.servers import Launcher
from e2e.terminal import terminal


def ports(first: int) -> list[str]:
    return [f"--port={first}", f"--engine-port={first + 1}"]


def test_the_demo_shows_a_screen_and_gives_the_terminal_back() -> None:
    first = free_ports(5)[0]
    with terminal("demo", "--load=12", *ports(first)) as shown:
        wanted = ("Engines", "Shared prefixes", "Calls", "engine-3", "hit rate", "exploit", "ok 200", "■ ", "KV cache")
        eventually(lambda: all(part in shown.text for part in wanted))
        assert f"http://127.0.0.1:{first}/#key=" in shown.text
        shown.interrupt()
        eventually(lambda: shown.process.poll() is not None)
        assert shown.process.returncode in {0, 130}
        eventually(lambda: shown.is_restored)
        assert "Traceback" not in shown.text
    eventually(lambda: all(refused(port) for port in range(first, first + 5)))


def test_sigterm_gives_the_terminal_back_too() -> None:
    first = free_ports(5)[0]
    with terminal("demo", *ports(first)) as shown:
        eventually(lambda: "Engines" in shown.text)
        shown.process.terminate()
        eventually(lambda: shown.process.poll() is not None)
        eventually(lambda: shown.is_restored)
        assert shown.process.returncode == 0


@pytest.mark.parametrize(
    ("load", "pattern"),
    [
        ("2", r"engine-\d \(\w+\) +\d+ prompt tokens, +\d+\.\d% cached, TTFT .*, E2E .*, ok 200"),
        ("25", r"\d+\.\d calls/s, hit rate \d+\.\d%, median TTFT .*, calls on engines [\d ]+, \d+ wait"),
    ],
)
def test_without_a_terminal_there_are_lines(load: str, pattern: str) -> None:
    first = free_ports(5)[0]
    command = [str(PLAIT), "demo", f"--load={load}", *ports(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            assert "\x1b" not in line
            if re.fullmatch(pattern, line.rstrip("\n")):
                break
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert rest.endswith("stopping\n")
        assert process.wait(DEADLINE_S) == 0
    eventually(lambda: all(refused(port) for port in range(first, first + 5)))


def test_a_served_gateway_can_be_watched_with_its_key(launch: Launcher) -> None:
    engine = launch.engine("alone")
    gateway = launch.gateway([engine], server={"admin_key": "right"})
    engine.start()
    gateway.start()
    gateway.wait_until_ready()
    with terminal("live", gateway.url, "--key=right") as shown:
        eventually(lambda: "alone" in shown.text)
        shown.interrupt()
        eventually(lambda: shown.process.poll() is not None)
        eventually(lambda: shown.is_restored)
    wrong = [str(PLAIT), "live", gateway.url, "--key=wrong"]
    refusal = subprocess.run(wrong, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert refusal.returncode == 2
    assert refusal.stderr == f"plait: {gateway.url} does not take this admin key\n"
