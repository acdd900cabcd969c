"""`plait serve`: runs the gateway."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

import msgspec

import plait.gateway.log  # noqa: F401 - before all that imports structlog
from plait.gateway.app import Gateway
from plait.gateway.commands import given_engines, port, positive
from plait.gateway.commands.given_engines import GivenEngines, LastGood
from plait.gateway.commands.server_secret import server_secret
from plait.gateway.config.sections import Config
from plait.gateway.log.events import configure_logging, write_stderr_in_background
from plait.gateway.server.connection import ClientBounds
from plait.gateway.server.http_server import Stops, run_draining_server
from plait.gateway.server.listening import bound_sockets, shared_sockets, url_of
from plait.gateway.server.request_bounds import RequestLimits, bounds_by_descriptors
from plait.gateway.server.slow_clients import SlowClients
from plait.gateway.server.workers import Worker, WorkerProcesses

LOOPBACK = "127.0.0.1"
"""The host at which the workers of one machine reach each other."""

SWITCH_INTERVAL_S = 0.0005
"""A thread releases the GIL after this time if another thread waits for it. Python's default is 5 ms. The event loop
takes the GIL some ten times for a call, so that beside threads that tokenize a call took 60 ms longer.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    given_engines.add_arguments(parser)
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write what is found of the engines as a configuration"
    )
    parser.add_argument("--host", help="listen on this host instead of server.host")
    parser.add_argument("--port", type=port, help="listen on this port instead of server.port")
    parser.add_argument("--workers", type=positive, metavar="N", help="processes that serve, instead of server.workers")


def run(arguments: argparse.Namespace) -> None:
    """Serve until stopped; SIGHUP re-reads the file. Raises ValueError for a configuration that cannot be used."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server listens: the default ends the process
    configure_logging("info", "auto")  # reading the file may log warnings
    given = given_engines.given_engines(arguments)
    config = given.load()
    configure_logging(config.log.level, config.log.format)
    if arguments.save is not None and arguments.save.exists():
        raise ValueError(f"{arguments.save} is there already: give --save the name of a new file")
    if arguments.save is not None and not os.access(f"{arguments.save.parent}/", os.W_OK | os.X_OK):
        raise ValueError(f"--save {arguments.save}: {arguments.save.parent} is no folder that this user can write to")
    secret, ports = server_secret(config, given.path), _ports(arguments, config)
    workers = arguments.workers or config.server.workers
    check_store(config, workers)
    _check_address(config)
    if workers > 1:
        with TemporaryDirectory(prefix="plait-") as folder:  # workers without a store have one account, too
            accounts = _accounts(config) or Path(folder) / "accounts.db"
            _run_workers(arguments, given, ports, secret, workers=workers, accounts=accounts)
        return
    write_stderr_in_background()
    gateway = Gateway(config, secret, arguments.save, accounts=_accounts(config))
    _serve(gateway, Worker(0, [one for host, port in ports for one in bound_sockets(host, port)]), given.load)


def _ports(arguments: argparse.Namespace, config: Config) -> list[tuple[str, int]]:
    """Host and port of each listener: for clients, then for the admin API if it has its own."""
    host, port = arguments.host or config.server.host, arguments.port or config.server.port
    admin_port = config.server.admin_port
    return [(host, port)] if admin_port is None else [(host, port), (host, admin_port)]


def _run_workers(
    arguments: argparse.Namespace,
    given: GivenEngines,
    ports: Sequence[tuple[str, int]],
    secret: bytes,
    *,
    workers: int,
    accounts: Path,
) -> None:
    """Run `workers` processes that serve, and supervise them. This process starts no thread, because it forks.

    Raises SystemExit with the status of a worker that could not start.
    """
    from plait.gateway.guests.peers.peers import Peers  # noqa: PLC0415 - one process needs no peers
    from plait.gateway.guests.peers.signatures import PeerKey  # noqa: PLC0415

    last_good = LastGood(given.load)
    private = [bound_sockets(LOOPBACK, 0) for _ in range(workers)]
    listeners = [shared_sockets(host, port, workers) for host, port in ports]
    urls, key = {str(number): url_of(sockets[0]) for number, sockets in enumerate(private)}, PeerKey(token_hex(32))

    def serve(worker: Worker) -> None:
        write_stderr_in_background()

        def load() -> Config:
            return _of_worker(given.load(), worker.number, workers)

        config, name = _of_worker(last_good.load(), worker.number, workers), str(worker.number)
        configure_logging(config.log.level, config.log.format, worker=name)
        save_to = arguments.save if worker.number == 0 else None  # one worker writes the file for all
        _serve(Gateway(config, secret, save_to, Peers(urls, name, key), accounts=accounts), worker, load)

    # For each worker: its sockets on the shared ports, and its private one for the other workers.
    groups = [[one for sockets in each for one in sockets] for each in zip(*listeners, private, strict=True)]
    ports_shared = {one.getsockname()[1] for shared in listeners for one in shared[0]}
    status = WorkerProcesses(groups, ports_shared, serve, on_hangup=last_good.load).run()
    if status:
        raise SystemExit(status)


def _accounts(config: Config) -> Path | None:
    """The file of the accounts beside that of the store; None: there is none."""
    path = None if config.store.path is None else Path(config.store.path)
    return None if path is None else path.with_name(f"{path.name}.accounts")


def _of_worker(config: Config, number: int, workers: int) -> Config:
    """The configuration of one worker. Each worker has its own sessions, and so a store file of its own."""
    path = config.store.path
    if path is None:
        return config
    store = msgspec.structs.replace(config.store, path=str(_part(Path(path), number, workers)))
    return msgspec.structs.replace(config, store=store)


def _part(path: Path, number: int, workers: int) -> Path:
    return path.with_name(f"{path.name}.{number}-of-{workers}")


def check_store(config: Config, workers: int) -> None:
    """Raise ValueError if another number of workers wrote the store: sessions would be in the wrong worker's file.

    Also raise ValueError for several workers with a shared store, because each process in it needs its own address.
    """
    if config.store.url is not None and workers > 1:
        raise ValueError("--workers: expected 1 with store.url; start several gateways, each with an advertise_url")
    if config.store.path is None:
        return
    path = Path(config.store.path)
    own = {path} if workers == 1 else {_part(path, number, workers) for number in range(workers)}
    of_workers = re.compile(rf"{re.escape(path.name)}(\.[0-9]+-of-[0-9]+)?")
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    others = sorted(file.name for file in beside if of_workers.fullmatch(file.name) and file not in own)
    if others:
        raise ValueError(
            f"{path.parent} has the store of another number of workers ({', '.join(others[:3])}): serve with as many, "
            "or move these files away and give up their sessions"
        )


def _check_address(config: Config) -> None:
    """Raise ValueError if another gateway of the shared store answers at this gateway's address.

    With the same address, this gateway would take over the other gateway's sessions.
    """
    if config.store.url is None:
        return
    from plait.gateway.guests.peers.namesake import has_namesake  # noqa: PLC0415 - as above
    from plait.gateway.guests.peers.peers import Peers  # noqa: PLC0415

    if asyncio.run(has_namesake(Peers.sharing(config.server))):
        raise ValueError(
            f"server.advertise_url = {config.server.advertise_url}: another gateway answers there, which has the same; "
            "give each its own"
        )


def _serve(gateway: Gateway, worker: Worker, load: Callable[[], Config]) -> None:
    """Serve as this worker, until a signal comes or its parent has ended.

    At SIGHUP, the gateway calls `load` and applies the configuration.
    """
    server = gateway.config.server
    limits = RequestLimits(
        max_headers=server.max_headers,
        max_header_bytes=server.max_header_bytes,
        header_timeout_s=server.header_timeout_s,
        body_timeout_s=server.body_timeout_s,
    )
    slow_clients = SlowClients(server.slow_client_timeout_s, gateway.kernel.on_slow_client)
    connections = bounds_by_descriptors(server.max_connections)
    gateway.kernel.bodies.serve(connections.max_connections)
    bounds = ClientBounds(
        limits, gateway.kernel.refusals.unread, slow_clients, connections, worker.share, needs_keys=gateway.needs_keys,
        lag=gateway.kernel.router.health.lag,
    )  # fmt: skip
    on_hangup = partial(gateway.kernel.reloading.reload, load)
    stops = Stops(gateway, server.drain_delay_s, server.shutdown_grace_s, on_hangup, worker.parent, worker.share)
    run_draining_server(gateway.app, worker.sockets, stops, bounds)
