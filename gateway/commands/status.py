"""`plait status`: what is wrong with a gateway now. Exit status: 0 for nothing, 1 for problems, 2 without an answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from time import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

PAGE = "docs/oncall.md"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the gateway (default: %(default)s)")
    parser.add_argument("--key", default=os.environ.get("PLAIT_ADMIN_KEY"), help="default: PLAIT_ADMIN_KEY")
    parser.add_argument("--json", action="store_true", help="the answer itself")


def run(arguments: argparse.Namespace) -> None:
    """Print, and exit with 1 if there are problems. Raises ValueError for a gateway that does not answer."""
    import httpx  # noqa: PLC0415 - takes long to import

    if not arguments.key:
        raise ValueError("give the gateway's admin key: --key, or PLAIT_ADMIN_KEY")
    url, headers = arguments.url.rstrip("/"), {"authorization": f"Bearer {arguments.key}"}
    try:
        answer = httpx.get(f"{url}/admin/status", headers=headers, timeout=10.0)
        engines = httpx.get(f"{url}/admin/engines", headers=headers, timeout=10.0)
        status, fleet = answer.json(), engines.json()
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise ValueError(f"{url} does not answer as a gateway does: {error}") from error
    if answer.status_code != 200:
        raise ValueError(f"{url}: {status['error']['message']}")
    problems, listed = status["problems"], fleet["data"]
    print(json.dumps({"problems": problems, "engines": listed}) if arguments.json else _text(problems, listed))
    if problems:
        sys.exit(1)


def _text(problems: Sequence[Mapping[str, Any]], engines: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join((*_problems(problems), "", *map(_engine, engines)))


def _problems(problems: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not problems:
        yield "Nothing is wrong."
    for one in problems:
        yield f"{one['code']:<24} {_ago(one['since']):>8}  {one['sentence']}  ({PAGE}#{one['part']})"


def _engine(engine: Mapping[str, Any]) -> str:
    state = "draining" if engine["state"] == "draining" else engine["health"]
    cause = f"  {engine['cause']}" if engine["cause"] else ""
    return f"{engine['name']:<24} {state:<10} {engine['outstanding_calls']:>5} calls  since {engine['since']}{cause}"


def _ago(since: float) -> str:
    seconds = max(0.0, time() - since)
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.0f} h"
    )
