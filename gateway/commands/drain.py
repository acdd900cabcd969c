"""`plait drain`: stops new calls to an engine, in all workers and gateways."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from plait.gateway.commands import add_address

if TYPE_CHECKING:
    import argparse

    from plait.gateway.commands.asked_gateway import AskedGateway

EACH_S: Final = 1.0
"""The polling period of `--wait`."""

LATELY_S: Final = 600.0
"""The time before now whose calls `--dry-run` reads."""

MOST_RECEIPTS: Final = 200
"""The most receipts that a gateway returns for one request."""

SILENT: Final = ("peer_stale", "worker_down")
"""Problems of a worker or gateway that does not answer, and may have calls on the engine. A dead gateway (`peer_lost`)
has none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", metavar="ENGINE", help="its name, as `plait status` shows it")
    add_address(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--wait", action="store_true", help="until no call is on it")
    how.add_argument("--undo", action="store_true", help="give it calls again")
    how.add_argument(
        "--dry-run", action="store_true", help="say where its calls of the last ten minutes would have gone"
    )


def run(arguments: argparse.Namespace) -> None:
    """Change the engine's state, or show what would change. Prints the result.

    Raises ValueError for an unknown engine, and if the gateway refuses or does not answer.
    """
    from plait.gateway.commands.asked_gateway import AskedGateway  # noqa: PLC0415 - takes long to import

    gateway, name = AskedGateway(arguments.url, arguments.key), arguments.engine
    path = f"/admin/engines/{quote(name, safe='')}"
    if arguments.dry_run:
        gateway.ask(path)  # raises for an unknown engine; its list of receipts would just be empty
        asked = f"/admin/receipts?engine={quote(name, safe='')}&limit={MOST_RECEIPTS}"
        print("\n".join(elsewhere(name, gateway.ask(asked)["data"], time.time())))
        return
    engine = gateway.ask(path, "POST", {"state": "active" if arguments.undo else "draining"})
    if arguments.undo:
        print(f"{name} gets calls again.")
    elif engine["hands_over"]:
        print(f"{name} hands its prefixes over, then gets no new calls.", flush=True)
    else:
        print(f"{name} gets no new calls.", flush=True)
    alone_for = engine.get("alone_for")  # an older gateway does not say
    if alone_for and not arguments.undo:
        print(f"Warning: no other engine takes calls for {', '.join(alone_for)}: they get 503.", flush=True)
    if arguments.wait:
        _wait(gateway, name)
        print(f"No call is on {name}.")


def _wait(gateway: AskedGateway, name: str) -> None:
    """Return once no gateway has a call on the engine or may send one. A gateway that does not answer may."""
    told: Sequence[str] = ()
    while True:
        status = gateway.ask("/admin/status")
        silent = [problem["about"] for problem in status["problems"] if problem["code"] in SILENT]
        engines = [row for row in status["engines"] if row["name"] == name]  # empty once the engine is removed
        if not silent and not any(row["calls"] or row["state"] != "draining" for row in engines):
            return
        if silent != told:
            print("".join(f"{one} does not answer.\n" for one in silent), end="", flush=True)
        told = silent
        time.sleep(EACH_S)


def elsewhere(name: str, receipts: Sequence[Mapping[str, Any]], now_s: float) -> Iterator[str]:
    """Lines that say where the latest calls of an engine would have gone without it. `receipts`: the newest first."""
    lately = [receipt for receipt in receipts if receipt["at"] >= now_s - LATELY_S]
    if not lately:
        yield f"No receipt of the last ten minutes is of {name}."
        return
    # A full list may not reach back over the whole time.
    time_s = now_s - lately[-1]["at"] if len(lately) == MOST_RECEIPTS else LATELY_S
    yield f"Without {name} its {len(lately)} calls of the last {time_s:.0f} s would have gone, each by itself:"
    costs: dict[str, list[float]] = defaultdict(list)
    for receipt in lately:
        place, cost_s = _next(next(one for one in receipt["attempts"][::-1] if one["engine"] == name))
        costs[place].append(cost_s)
    for place, costs_s in sorted(costs.items(), key=lambda item: -len(item[1])):
        mean_s = sum(costs_s) / len(costs_s)
        cost = "" if isnan(mean_s) else f", at {mean_s:+.3f} s of cost"
        yield f"  {len(costs_s):>3} {place}{cost}"


def _next(attempt: Mapping[str, Any]) -> tuple[str, float]:
    """Where a call would have gone, in words, and by how many seconds its cost is higher there; NaN: not known."""
    place, margin_s = attempt["next_engine"], attempt["margin_s"]
    if place is not None and margin_s is not None:
        return f"to {place}", margin_s
    return "nowhere: no other engine could take them" if attempt["rule"] == "only_engine" else "not compared", nan
