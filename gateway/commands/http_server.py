"""Runs Plait's own servers under uvicorn."""

from __future__ import annotations

from functools import partial

import uvicorn
from starlette.types import ASGIApp

from plait.gateway.commands.slow_clients import PatientProtocol, SlowClients

KEEP_ALIVE_S = 75
"""Longer than Plait's clients keep an idle connection, so that the client, not the server, closes it."""


def run_server(app: ASGIApp, host: str, port: int, *, grace_s: float, slow_clients: SlowClients | None = None) -> None:
    """Serve until SIGINT or SIGTERM; running requests then get `grace_s` to end. None: no client is too slow."""
    uvicorn.run(
        app,
        host=host,
        port=port,
        http="httptools" if slow_clients is None else partial(PatientProtocol, slow_clients=slow_clients),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
