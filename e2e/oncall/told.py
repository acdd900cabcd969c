"""What a gateway says is wrong, in each place, has to be a finding of its `/admin/status`, with the reason.

`SIGNS` is the one table: each sign, and the codes of the findings of which one has to be there. `untold` reads all
signs of one gateway, and returns those that its status does not have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from e2e.server_process import Server, eventually
from plait.gateway.config.values import RANK_NAME

ADMIN: Final = {"authorization": "Bearer the-admin-key"}
AWAY: Final = frozenset({"peer_stale", "clocks_differ", "peer_lost"})

SIGNS: Final[Mapping[str, frozenset[str]]] = {
    "/ready out": frozenset({"engine_out"}),
    "/ready degraded": frozenset({"engine_differs"}),
    "/ready engines_up": frozenset({"no_engine"}),
    "/ready stale": AWAY,
    "/ready not trusted": frozenset({"peer_not_trusted"}),
    "/ready store": frozenset({"store_failing"}),
    "/admin/engines cause": frozenset({"engine_out"}),
    "/admin/engines degraded": frozenset({"engine_differs"}),
    "plait_engine_up": frozenset({"engine_out"}),
    "plait_engine_stalled": frozenset({"engine_stuck", "engine_out"}),
    "plait_engine_degraded": frozenset({"engine_differs"}),
    "plait_peer_up": AWAY,
    "plait_peers_not_trusted": frozenset({"peer_not_trusted"}),
    "plait_store_failing": frozenset({"store_failing"}),
    "plait_worker_up": frozenset({"worker_down"}),
    "log: engine down": frozenset({"engine_out"}),
    "log: engine ejected": frozenset({"engine_out"}),
    "log: engine probation": frozenset({"engine_out"}),
    "log: cache-state report refused": frozenset({"engine_differs"}),
    "log: engine differs": frozenset({"engine_differs"}),
    "log: token ids not sent": frozenset({"engine_differs"}),
    "log: the store cannot be used: what comes now is in memory only": frozenset({"store_failing"}),
    "log: configuration refused, the old one stays": frozenset({"reload_refused"}),
    "log: certificates refused, the old ones stay": frozenset({"reload_refused"}),
    "log: engine not taken over": frozenset({"reload_refused"}),
}
"""`plait_problem` and the log's `problem` name a code themselves."""

NO_STATE: Final = frozenset(
    {
        "engine draining",
        "engine failed a call",
        "engine has no cache-state report: its cache is estimated",
        "no tokenizer found: tokens are estimated, and cached prefixes are guessed",
    }
)
"""Warnings of what has happened once, of what an administrator has asked for, and of how an engine without the adapter
is served for as long as it runs.
"""

OVER: Final = {
    "the store is written again": "the store cannot be used: what comes now is in memory only",
    "configuration reloaded": "configuration refused, the old one stays",
}
"""What the log says once something is over."""

ONE_BY_ZERO: Final = frozenset({"plait_engine_up", "plait_peer_up", "plait_worker_up"})
"""Gauges that are 0 if something is wrong. The others are above 0 then."""


class Sign(NamedTuple):
    """Something that is wrong with `about` (empty: with the gateway); the finding has to have the words."""

    what: str
    about: str = ""
    words: str = ""


def check(server: Server) -> None:
    """Raises `AssertionError` with what a gateway knows to be wrong and its status does not say."""
    left: list[Sign] = []

    def is_all_told() -> bool:
        left[:] = untold(server)
        return not left

    try:
        eventually(is_all_told)
    except AssertionError as failure:
        raise AssertionError(f"{server.name} does not say in /admin/status: {left}") from failure


def untold(server: Server) -> list[Sign]:
    """The signs of a gateway without a finding."""
    signs = [*_of_ready(server), *_of_metrics(server), *_of_admin(server), *_of_log(server)]
    status = server.get("/admin/status", headers=ADMIN).json()
    found = {(one["code"], _about(server, one["about"])): one["sentence"] for one in status["problems"]}
    told = {(line["code"], _about(server, line["about"])) for line in events(server) if line["event"] == "problem"}
    asked = {row["name"] for row in status["engines"] if row["state"] in {"draining", "handing over"}}
    return [sign for sign in signs if sign.about not in asked and not _is_told(server, sign, found, told)]


def _is_told(server: Server, sign: Sign, found: Mapping[tuple[str, str], str], told: set[tuple[str, str]]) -> bool:
    codes = SIGNS.get(sign.what) or frozenset({sign.what.rpartition(" ")[2]})
    about = _about(server, sign.about)
    if sign.what.startswith("log: ") and any((code, about) in told for code in codes):
        return True  # also if it is over
    if sign.what == "plait_peers_not_trusted":  # it only counts
        return any(code in codes for code, _ in found)
    return any(sign.words in found[code, about] for code in codes if (code, about) in found)


def _about(server: Server, about: str) -> str:
    """The name of what is told of each rank is the address's, and that of the gateway itself is empty."""
    return "" if about in {server.url, "0"} else RANK_NAME.sub("", about)


def _of_ready(server: Server) -> Iterator[Sign]:
    ready = server.get("/ready").json()
    for engine, health in ready.get("out", {}).items():
        if health["health"] != "untried":
            yield Sign("/ready out", engine, health["cause"])
    for engine, why in ready.get("degraded", {}).items():
        yield Sign("/ready degraded", engine, why)
    for model, engines in ready["engines_up"].items():
        if not engines:
            yield Sign("/ready engines_up", model)
    for url, state in ready.get("peers", {}).items():
        if state != "live":
            yield Sign(f"/ready {state}", url)
    if ready.get("store", "ok") != "ok":
        yield Sign("/ready store", "", ready["store"])


def _of_metrics(server: Server) -> Iterator[Sign]:
    names = {name for name in SIGNS if name.startswith("plait_")} | {"plait_problem"}
    lines = [
        line for line in server.get("/metrics").text.splitlines(keepends=True) if re.split(r"[ {]", line)[0] in names
    ]
    for family in text_string_to_metric_families("".join(lines)):
        for name, labels, value, *_ in family.samples:
            if bool(value) is (name not in ONE_BY_ZERO):
                about = labels.get("engine") or labels.get("peer") or labels.get("about") or ""
                yield Sign(f"plait_problem {labels['code']}" if name == "plait_problem" else name, about)


def _of_admin(server: Server) -> Iterator[Sign]:
    for engine in server.get("/admin/engines", headers=ADMIN).json()["data"]:
        if engine["health"] not in {"up", "suspect", "untried"}:
            words = engine["last_error"] if engine["health"] == "down" else engine["cause"]
            yield Sign("/admin/engines cause", engine["name"], words or "")
        if engine["degraded"]:
            yield Sign("/admin/engines degraded", engine["name"], engine["degraded"])


def _of_log(server: Server) -> Iterator[Sign]:
    """The warnings, of each engine's health only the latest, so that one that is up again is not out."""
    signs: dict[tuple[str, str], Sign] = {}
    for line in events(server):
        event, about = line["event"], line.get("engine") or line.get("url") or line.get("about") or ""
        if event in {"engine up", "engine down", "engine ejected", "engine probation"}:
            signs.pop(("health", about), None)
            if event != "engine up":
                signs["health", about] = Sign(f"log: {event}", about)
        elif event in OVER:
            signs.pop((OVER[event], about), None)
        elif line["level"] in {"warning", "error"} and event not in NO_STATE:
            event = f"problem {line['code']}" if event == "problem" else event
            signs[event, about] = Sign(f"log: {event}", about)
    yield from signs.values()


def events(server: Server) -> list[dict[str, Any]]:
    """The lines of the log that are of no call."""
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    return [line for line in lines if "request_id" not in line]
