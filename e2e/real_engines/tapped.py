"""A gateway over one engine that is asked through a recording proxy: the client gets the bytes that the engine sent."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.ports import free_port
from e2e.real_engines.engine import MODEL, RealEngine
from e2e.real_engines.recording_proxy import RecordingProxy
from e2e.server_process import Server, eventually
from e2e.servers import toml


@dataclass(frozen=True)
class Tapped:
    """A gateway over one engine, and what the engine answered."""

    gateway: Server
    proxy: RecordingProxy

    def check(self, path: str, body: dict[str, Any]) -> None:
        """Send a request: the client's status and bytes are the engine's.

        An error that has not OpenAI's shape gets it on the way.
        """
        self.proxy.answers.clear()
        response = self.gateway.post(path, json={"model": MODEL, **body})
        assert response.headers["plait-engine"] == "tapped"
        eventually(lambda: len(self.proxy.answers) == 1)  # the proxy notes an answer once it has sent it
        status, sent = self.proxy.answers[-1]
        assert response.status_code == status
        assert response.content == sent or (status >= 400 and "error" not in json.loads(sent))


def tapped(stack: ExitStack, engine: RealEngine, model: Path, folder: Path, name: str) -> Tapped:
    """A gateway that reaches the engine through a proxy; `stack` stops both."""
    proxy, port = stack.enter_context(RecordingProxy(engine.url)), free_port()
    config = {
        "server": {"port": port, "drain_delay_s": 0},  # no load balancer has to notice its end
        "models": [{"name": MODEL, "tokenizer": str(model)}],
        "engines": [{"name": "tapped", "url": proxy.url}],
    }
    path = folder / f"{name}.toml"
    path.write_text(toml(config))
    gateway = Server(name, port, ["serve", "--config", str(path)], folder / f"{name}.log", ready_path="/ready")
    gateway.start()
    stack.callback(gateway.stop)
    gateway.wait_until_ready()
    eventually(lambda: gateway.metric("plait_engine_up") == 1)
    return Tapped(gateway, proxy)
