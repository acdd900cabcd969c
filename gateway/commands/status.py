"""`plait status`: what is wrong with a gateway now. Exit status: 0 for nothing, 1 for problems, 2 without an answer."""

from __future__ import annotations

import argparse
import json
import sys

from plait.gateway.commands import add_address
from plait.gateway.commands.asked_gateway import AskedGateway
from plait.gateway.commands.screen import Screen, console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "url")
    parser.add_argument("--json", action="store_true", help="the answer itself")


def run(arguments: argparse.Namespace) -> None:
    """Print the status, and exit with 1 if there are problems. Raises ValueError if the gateway does not answer."""
    gateway = AskedGateway(arguments.url, arguments.key)
    status = gateway.ask("/admin/status")
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        screen = Screen(gateway.url)
        screen.take("status", status)
        console().print(screen)
    if status["problems"]:
        sys.exit(1)
