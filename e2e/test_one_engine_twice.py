"""An engine that is configured under two addresses."""

from __future__ import annotations

from e2e.server_process import eventually
from e2e.servers import Launcher

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Which of the two?"}], "max_tokens": 3}


def test_the_first_gets_the_calls_and_the_second_takes_over(launch: Launcher) -> None:
    engine, other = launch.engine("one"), launch.engine("other")
    for server in (engine, other):
        server.start()
        server.wait_until_ready()
    entries = [
        {"name": "first", "url": f"http://localhost:{engine.port}"},
        {"name": "second", "url": f"http://127.0.0.1:{engine.port}"},
        {"name": "other", "url": other.url},
    ]
    gateway = launch.gateway(entries, server={"admin_key": "sk-admin"})
    gateway.start()
    gateway.wait_until_ready()
    reason = "it is engine first under another address, and gets no calls"
    eventually(lambda: gateway.get("/ready").json().get("degraded") == {"second": reason})
    eventually(lambda: gateway.get("/ready").json()["engines_up"] == {"demo": 2})
    asked = [gateway.post("/v1/chat/completions", json=CHAT).headers["plait-engine"] for _ in range(6)]
    assert "second" not in asked
    authorization = {"authorization": "Bearer sk-admin"}
    drained = gateway.post("/admin/engines/first", json={"state": "draining"}, headers=authorization)
    assert drained.status_code == 200
    eventually(lambda: gateway.metric("plait_engine_up", engine="second") == gateway.processes)
    assert "degraded" not in gateway.get("/ready").json()
    log = gateway.log()
    assert "two engines may be one" in log
    assert log.count("engine differs") == gateway.processes
