"""The subcommands of `plait`: each module has `add_arguments(parser)` and `run(arguments)`."""

from __future__ import annotations

import argparse
import os
from typing import Any


def positive(text: str) -> int:
    """The argument's value, which must be a whole number of at least 1: a `type` of argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text}")
    return value


def port(text: str) -> int:
    value = positive(text)
    if value > 65_535:
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, not {text}")
    return value


def positive_number(text: str) -> float:
    """The argument's value, which must be a number above 0: a `type` of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, not {text}")
    return value


def add_address(parser: argparse.ArgumentParser, name: str = "--url") -> None:
    """Add the arguments for the gateway's address and its admin key. An address named `url` is positional."""
    may_be_left_out: dict[str, Any] = {} if name.startswith("-") else {"nargs": "?"}
    text = "the gateway (default: %(default)s)"
    parser.add_argument(name, default="http://127.0.0.1:8000", help=text, **may_be_left_out)
    parser.add_argument("--key", default=os.environ.get("PLAIT_ADMIN_KEY"), help="default: PLAIT_ADMIN_KEY")
