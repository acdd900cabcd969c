"""An address behind which a load balancer has several engines, beside one of a server with ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e.ports import free_port
from e2e.server_process import PLAIT, Server, eventually
from e2e.servers import Launcher

AUTHORIZATION = {"authorization": "Bearer sk-admin"}
SAID = "several engines answer at its address"


@contextmanager
def balanced(*servers: Server) -> Iterator[str]:
    """The address of a load balancer before the servers."""
    port = free_port()
    command = [sys.executable, "-m", "e2e.balancer", str(port), *(str(server.port) for server in servers)]
    with subprocess.Popen(command) as balancer:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            balancer.terminate()


def test_status_and_probe_name_a_load_balancer_and_no_server_with_ranks(launch: Launcher) -> None:
    engines = [launch.engine("one"), launch.engine("two"), launch.engine("ranked", options=["--ranks", "3"])]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_until_ready()
    with balanced(*engines[:2]) as url:
        gateway = launch.gateway([{"name": "service", "url": url}, engines[2]], server={"admin_key": "sk-admin"})
        gateway.start()
        gateway.wait_until_ready()

        def problems() -> Any:
            return gateway.get("/admin/status", headers=AUTHORIZATION).json()["problems"]

        eventually(lambda: [one["code"] for one in problems()] == ["engine_differs"])
        (problem,) = problems()
        assert (problem["about"], problem["part"]) == ("service", "an-engine-is-not-what-it-seems")
        assert SAID in problem["sentence"]
        assert "[[services]]" in problem["sentence"]
        assert [name for name, said in gateway.get("/ready").json()["degraded"].items() if SAID in said] == ["service"]
        assert gateway.log().count('"event":"engine differs"') == gateway.processes, "once"
        command = [str(PLAIT), "check-config", "--probe", "--probe-timeout-s", "60"]
        given = [argument for engine in (url, engines[2].url) for argument in ("--engine", engine)]
        checked = subprocess.run([*command, *given], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stdout.count(SAID)) == (2, 1), checked.stdout + checked.stderr
        hasty = subprocess.run([*command[:-1], "2", *given], capture_output=True, text=True, check=False).stdout
        late = f"{url.removeprefix('http://')}: not all was compared within 2 s: see --probe-timeout-s\n"
        assert late in hasty or ": no answer" in hasty, hasty
