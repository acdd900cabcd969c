"""Runs Plait's own servers under uvicorn."""

from __future__ import annotations

from functools import partial

import uvicorn
from starlette.types import ASGIApp

from plait.gateway.commands.http_protocol import ANY_CLIENT, BoundedProtocol, ClientBounds
from plait.gateway.commands.last_resort import LastResort

KEEP_ALIVE_S = 75
"""Longer than Plait's clients keep an idle connection, so that the client, not the server, closes it."""


def run_server(app: ASGIApp, host: str, port: int, *, grace_s: float, bounds: ClientBounds = ANY_CLIENT) -> None:
    """Serve until SIGINT or SIGTERM; running requests then get `grace_s` to end."""
    uvicorn.run(
        LastResort(app),
        host=host,
        port=port,
        http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
