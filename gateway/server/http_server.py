"""Runs Plait's own servers under uvicorn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from socket import socket

import uvicorn
from starlette.types import ASGIApp

from plait.gateway.server.draining_server import DrainingServer, Stops
from plait.gateway.server.http_protocol import ANY_CLIENT, BoundedProtocol, ClientBounds
from plait.gateway.server.listening import ListeningServer, bound_sockets
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.server.request_bounds import bounds_by_descriptors

KEEP_ALIVE_S = 75
"""Longer than Plait's clients keep an idle connection, so that the client, not the server, closes it."""

BACKLOG = 16_384
"""Connections that wait to be accepted, or fewer if the system allows fewer. Beyond, a client tries again after a
second."""

AFTER_CUT_S = 2
"""Seconds that requests get to end once they were cut. Then uvicorn cancels them."""


def run_server(app: ASGIApp, host: str, port: int, *, grace_s: float) -> None:
    """Serve until SIGINT or SIGTERM; running requests then get `grace_s` to end. Raises ValueError for its port."""
    sockets = bound_sockets(host, port)
    _run(ListeningServer(_config(OpenRequests(app), host, port, max(1, round(grace_s)))), sockets)


def run_draining_server(
    app: ASGIApp, sockets: Sequence[socket], stops: Stops, *, max_connections: int, bounds: ClientBounds
) -> None:
    """Serve on bound sockets until SIGINT or SIGTERM, which end as `stops` says.

    Clients may have `max_connections`, if the system gives the process enough file descriptors. `app` has its own
    `OpenRequests`.
    """
    host, port = sockets[0].getsockname()[:2]
    bounds = replace(bounds, connections=bounds_by_descriptors(max_connections))
    config = _config(app, host, port, ceil(stops.grace_s) + AFTER_CUT_S, bounds)
    _run(DrainingServer(config, stops), list(sockets))


def _run(server: uvicorn.Server, sockets: list[socket]) -> None:
    with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once it has stopped
        server.run(sockets)


def _config(app: ASGIApp, host: str, port: int, grace_s: int, bounds: ClientBounds = ANY_CLIENT) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        host=host,
        port=port,
        http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing asks for a client's address or scheme
        timeout_keep_alive=KEEP_ALIVE_S,
        backlog=BACKLOG,
        timeout_graceful_shutdown=grace_s,
    )
