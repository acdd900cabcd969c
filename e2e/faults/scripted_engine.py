"""An engine that misbehaves on command: `python -m e2e.faults.scripted_engine --port P --name N --model M`.

`PUT /mode` with `{"mode": name, "share": 0..1, "for": "calls"|"probes"|"all"}` says how. The modes are in `modes.py`,
and `healthy` ends them. `GET /stats` counts the calls. Modes about connections would shut these two routes out. They
are also on the control port, which is never touched. One process can be several engines, on as many ports.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from contextlib import suppress
from functools import partial

from e2e.faults.connection import Connection
from e2e.faults.engine_state import Engine, ListeningSocket
from e2e.faults.pace import Pace
from plait.backends.translation.translation import TRANSLATIONS


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m e2e.faults.scripted_engine")
    parser.add_argument("--port", type=int, action="append", required=True, help="once for each engine")
    parser.add_argument("--control-port", type=int, action="append", default=[], help="once for each engine, or never")
    parser.add_argument("--name", action="append", required=True, help="once for each engine")
    parser.add_argument("--model", action="append", required=True, help="its models, with commas; once for each engine")
    parser.add_argument("--first-s", type=float, default=0.0, help="seconds until the first byte of an answer")
    parser.add_argument("--token-s", type=float, default=0.0, help="seconds between two tokens")
    parser.add_argument("--route", action="append", default=[], choices=sorted(TRANSLATIONS), help="another API it has")
    parser.add_argument("--metrics", action="store_true", help="count calls and tokens in /metrics, as vLLM does")
    asyncio.run(_serve(parser.parse_args()))


async def _serve(arguments: argparse.Namespace) -> None:
    pace = Pace(arguments.first_s, arguments.token_s)
    control_ports = arguments.control_port or [None] * len(arguments.port)
    control_sockets = []
    for port, control_port, name, models in zip(
        arguments.port, control_ports, arguments.name, arguments.model, strict=True
    ):
        engine = Engine(name, models.split(","), pace, routes=arguments.route, has_metrics=arguments.metrics)
        engine.socket = ListeningSocket(port, partial(Connection, engine))
        if control_port is not None:
            control_sockets.append(ListeningSocket(control_port, partial(Connection, engine, is_control=True)))
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
