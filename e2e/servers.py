"""Plait's servers as a user starts them: a process each, on a port of its own, stopped and looked after when done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec.structs import asdict

from e2e.ports import free_port
from e2e.server_process import WORKERS, Server, eventually
from e2e.several_gateways import PEER_KEY, SECRET, Gateways
from plait.gateway.config.sections import UpstreamConfig
from plait.gateway.fleet.booking import UNHEARD_S
from tests.waiting import SLOWNESS, WITHIN_S

GATEWAYS = int(os.environ.get("PLAIT_TEST_GATEWAYS", "1"))
"""Gateways of each gateway that has a configuration, over one PostgreSQL: all must look as one to clients."""

PATIENCE = {"connect_timeout_s": WITHIN_S, "probe_timeout_s": WITHIN_S, "hang_timeout_s": WITHIN_S}
"""An engine on a busy machine is late, and not at fault. Tests of these limits set their own (`PATIENT`)."""

DEFAULTS: Mapping[str, Any] = asdict(UpstreamConfig())
PATIENT = {**DEFAULTS, **{name: SLOWNESS * DEFAULTS[name] for name in PATIENCE}}
"""The default limits for engines, on a machine of this speed."""
PATIENT["hang_timeout_s"] = min(PATIENT["hang_timeout_s"], UNHEARD_S / 2)
"""An engine that hangs has to be found before its calls are given up, whatever the machine's speed."""


class Launcher:
    """Starts servers whose files are in `folder`; as a context it stops them all at its end, gateways first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._gateways: list[Server] = []
        self._engines: list[Server] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        failures = []
        for servers in (self._gateways, self._engines):
            for server in servers:
                server.interrupt()
            for server in servers:
                try:
                    server.stop()
                except AssertionError as failure:
                    failures.append(str(failure))
        assert not failures, "\n".join(failures)

    def engine(
        self,
        name: str,
        *,
        model: str = "demo",
        time_scale: float = 20,
        options: Sequence[str] = (),
        port: int | None = None,
    ) -> Server:
        """An embedded engine, not started yet; `options` are further ones of `plait engine`."""
        port = port or free_port()
        arguments = ["engine", "--port", str(port), "--name", name, "--model", model, "--time-scale", str(time_scale)]
        engine = Server(name, port, [*arguments, *options], self._folder / f"{name}.log", ready_path="/health")
        self._engines.append(engine)
        return engine

    def gateway(
        self,
        engines: Iterable[Server | Mapping[str, Any]],
        name: str = "gateway",
        *,
        models: Sequence[str | Mapping[str, Any]] = ("demo",),
        **sections: Mapping[str, Any] | list[Mapping[str, Any]],
    ) -> Server:
        """A gateway over engines (servers, or entries of the configuration; so are models), not started yet.

        `sections` add to the configuration, or replace keys of it. A list is an array of tables, such as `tenants`.
        """
        if GATEWAYS > 1 and "store" not in sections:
            more: dict[str, Any] = {**sections, "models": models}
            return self.gateways(engines, name, **more)
        port = free_port()
        path = self._folder / f"{name}.toml"
        config: dict[str, Any] = {
            "server": {"port": port, "drain_delay_s": 0, "workers": WORKERS},
            "upstream": {"probe_interval_s": 0.05, **PATIENCE},
            "models": [{"name": one, "tokenizer": "embedded"} if isinstance(one, str) else one for one in models],
            "engines": [
                {"name": engine.name, "url": engine.url} if isinstance(engine, Server) else engine for engine in engines
            ],
        }
        for section, values in sections.items():
            config[section] = values if isinstance(values, list) else {**config.get(section, {}), **values}
        config["server"].setdefault("advertise_url", f"http://127.0.0.1:{port}")
        path.write_text(toml(config))
        return self._serve(name, port, ["--config", str(path)], config["server"]["workers"])

    def gateways(
        self,
        engines: Iterable[Server | Mapping[str, Any]],
        name: str = "gateway",
        *,
        database: str | None = None,
        count: int = max(3, GATEWAYS),
        **sections: Any,
    ) -> Gateways:
        """Several gateways that share a PostgreSQL (a new `database`), and a load balancer before them."""
        from e2e.postgresql.server import new_database, shared_postgres  # noqa: PLC0415

        store = {"url": database or new_database(shared_postgres())}
        server = {"secret": SECRET, "peer_key": PEER_KEY, **sections.pop("server", {})}
        engines = list(engines)
        members = [
            self.gateway(engines, f"{name}-{number}", server=server, store=store, **sections) for number in range(count)
        ]
        balanced = Gateways(name, free_port(), members, self._folder / f"{name}.log")
        self._gateways.append(balanced)
        return balanced

    def serve(self, *arguments: str, name: str = "gateway") -> Server:
        """A gateway by the arguments of `plait serve`, not started yet."""
        port = free_port()
        return self._serve(name, port, [*arguments, "--port", str(port)])

    def _serve(self, name: str, port: int, arguments: Sequence[str], processes: int = WORKERS) -> Server:
        log_path = self._folder / f"{name}.log"
        gateway = Server(name, port, ["serve", *arguments], log_path, ready_path="/ready", processes=processes)
        self._gateways.append(gateway)
        return gateway


@dataclass(frozen=True)
class Fleet:
    """A gateway and its engines by name."""

    gateway: Server
    engines: Mapping[str, Server]

    def start(self) -> None:
        """Start all, and wait for all."""
        for server in (*self.engines.values(), self.gateway):
            server.start()
        for server in (*self.engines.values(), self.gateway):
            server.wait_until_ready()
        eventually(lambda: self.gateway.metric("plait_engine_up") == self.gateway.processes * len(self.engines))


def toml(config: Mapping[str, Any]) -> str:
    """A configuration of tables and arrays of tables."""
    lines = []
    for section, value in config.items():
        tables = value if isinstance(value, list) else [value]
        heading = f"[[{section}]]" if isinstance(value, list) else f"[{section}]"
        for table in tables:
            lines.append(heading)
            lines += [f"{key} = {_inline(item)}" for key, item in table.items()]
    return "\n".join(lines) + "\n"


def _inline(value: object) -> str:
    """A value of a key; JSON's scalars and arrays are TOML's."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_inline(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
