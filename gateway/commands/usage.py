"""`plait usage`: what tenants, keys or models have used."""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from plait.gateway.commands import add_address, positive

if TYPE_CHECKING:
    from plait.gateway.commands.asked_gateway import AskedGateway

BY: Final = {"tenant": "project_id", "key": "api_key_id", "model": "model"}
COLUMNS: Final = {
    "requests": "num_model_requests",
    "input": "input_tokens",
    "cached": "input_cached_tokens",
    "output": "output_tokens",
    "cost": "cost",
    "engine_s": "engine_seconds",
    "estimated": "num_estimated_requests",
}
"""Each column, and its name in the answer."""
DAY_S: Final = 86_400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--by", choices=BY, default="tenant", help="default: %(default)s")
    parser.add_argument("--days", type=positive, default=30, metavar="N", help="the last ones (default: %(default)s)")
    parser.add_argument("--csv", action="store_true", help="a line for each day")
    add_address(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print a table. Raises ValueError if the gateway refuses or does not answer."""
    from plait.gateway.commands.asked_gateway import AskedGateway  # noqa: PLC0415 - takes long to import

    gateway = AskedGateway(arguments.url, arguments.key)
    rows = list(_rows(gateway, arguments.by, arguments.days))
    if arguments.csv:
        written = csv.writer(sys.stdout, lineterminator="\n")
        written.writerow(["day", arguments.by, *COLUMNS])
        written.writerows([day, who, *counts] for day, who, counts in rows)
        return
    sums: dict[str, list[float]] = {}
    for _, who, counts in rows:
        sums[who] = [total + one for total, one in zip(sums.get(who, [0] * len(COLUMNS)), counts, strict=True)]
    print(f"{arguments.by:24}", *(f"{name:>12}" for name in COLUMNS))
    for who, counts in sorted(sums.items()):
        print(f"{who or '-':24}", *(f"{one:>12.10g}" for one in counts))


def _rows(gateway: AskedGateway, by: str, days: int) -> Iterator[tuple[str, str, list[float]]]:
    """The day, whose use it is, and the counts."""
    start_s, page = int(time.time()) - (days - 1) * DAY_S, "0"
    while page:
        asked = f"start_time={start_s}&limit=31&group_by={BY[by]}&page={page}"
        answer = gateway.ask(f"/v1/organization/usage/completions?{asked}")
        for bucket in answer["data"]:
            day = time.strftime("%Y-%m-%d", time.gmtime(bucket["start_time"]))
            for result in bucket["results"]:
                yield day, result[BY[by]] or "", [result[name] for name in COLUMNS.values()]
        page = answer["next_page"]
