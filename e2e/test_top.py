"""`plait demo` and `plait top` in a pseudo-terminal, and what they do where there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

from e2e.demo import refused
from e2e.ports import free_ports
from e2e.server_process import PLAIT, eventually
from e2e.servers import Launcher
from e2e.terminal import terminal
from tests.waiting import WITHIN_S


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


def test_without_a_terminal_there_is_the_log() -> None:
    first = free_ports(5)[0]
    command = [str(PLAIT), "demo", "--load=5", *ports(first)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **streams, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        call = next(line for line in map(json.loads, process.stderr) if line["event"] == "call")
        assert (call["status"], call["outcome"]) == (200, "ok")
        os.killpg(process.pid, signal.SIGINT)
        shown, _ = process.communicate(timeout=WITHIN_S)
        assert f"plait top http://127.0.0.1:{first} --key " in shown
        assert "\x1b" not in shown
        assert shown.endswith("stopping\n")
        assert process.returncode == 0
    eventually(lambda: all(refused(port) for port in range(first, first + 5)))


def test_a_served_gateway_can_be_watched_with_its_key(launch: Launcher) -> None:
    engine = launch.engine("alone")
    gateway = launch.gateway([engine], server={"admin_key": "right"})
    engine.start()
    gateway.start()
    gateway.wait_until_ready()
    with terminal("top", gateway.url, "--key=right") as shown:
        eventually(lambda: "alone" in shown.text)
        shown.interrupt()
        eventually(lambda: shown.process.poll() is not None)
        eventually(lambda: shown.is_restored)
    wrong = [str(PLAIT), "status", gateway.url, "--key=wrong"]
    refusal = subprocess.run(wrong, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert refusal.returncode == 2
    assert (
        refusal.stderr == f"plait: {gateway.url}: Incorrect or missing API key: send 'Authorization: Bearer <key>'.\n"
    )
