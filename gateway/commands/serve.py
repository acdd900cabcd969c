"""`plait serve`: the gateway."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

from plait.gateway.app import Gateway
from plait.gateway.commands import given_engines, positive
from plait.gateway.commands.server_secret import server_secret
from plait.gateway.log.background_stderr import write_stderr_in_background
from plait.gateway.log.events import configure_logging
from plait.gateway.server.draining_server import Stops
from plait.gateway.server.http_protocol import ClientBounds, SlowClients
from plait.gateway.server.http_server import run_draining_server
from plait.gateway.server.request_bounds import RequestLimits

SWITCH_INTERVAL_S = 0.0005
"""A thread gives the interpreter's lock back after this time, if the event loop waits for it. Python's default is 5 ms,
and the event loop needs the lock some ten times for a call: beside threads that tokenize, a call took 60 ms more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    given_engines.add_arguments(parser)
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write what is found of the engines as a configuration"
    )
    parser.add_argument("--host", help="listen on this host instead of server.host")
    parser.add_argument("--port", type=positive, help="listen on this port instead of server.port")


def run(arguments: argparse.Namespace) -> None:
    """Serve until stopped; SIGHUP re-reads the file. Raises ValueError for a configuration that cannot be used."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    write_stderr_in_background()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens: its default would end the process
    configure_logging("info", "auto")  # the file may have something to warn of
    given = given_engines.given_engines(arguments)
    config = given.load()
    configure_logging(config.log.level, config.log.format)
    server = config.server
    host, port = arguments.host or server.host, arguments.port or server.port
    if arguments.save is not None and arguments.save.exists():
        raise ValueError(f"{arguments.save} is there already: give --save the name of a new file")
    gateway = Gateway(config, server_secret(config, given.path), arguments.save)
    limits = RequestLimits(
        max_headers=server.max_headers,
        max_header_bytes=server.max_header_bytes,
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
    )
    slow_clients = SlowClients(server.slow_client_timeout_s, gateway.on_slow_client)
    bounds = ClientBounds(limits, gateway.refusals.count, slow_clients)
    on_hangup = partial(gateway.reload, given.load)
    stops = Stops(gateway, server.drain_delay_s, server.shutdown_grace_s, on_hangup)
    run_draining_server(
        gateway, host, port, stops,
        admin_port=server.admin_port, max_connections=server.max_connections, bounds=bounds,
    )  # fmt: skip
