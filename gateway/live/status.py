"""What is wrong now: `GET /admin/status` of all workers and gateways, the gauge `plait_problem`, lines of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from time import time
from typing import Final

import msgspec
import structlog
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.gateway.api.auth import AdminAccess
from plait.gateway.live.problems import Problem, Problems
from plait.gateway.live.signs import SeenFleet
from plait.gateway.peers.forwarding import Forwarding
from plait.gateway.peers.peer_front import is_of_peer
from plait.gateway.peers.signatures import ADMIN_KEY, Checked, Forwarded
from plait.gateway.timer import loop_time_s

PATH: Final = "/admin/status"
PART_OF_OTHERS: Final = "a-gateway-dies"
"""The part of docs/oncall.md for gateways that cannot speak."""

LOOK_S: Final = 1.0
MOST_BYTES: Final = 2**22

log = structlog.get_logger(__name__)


class Watched(Collector):
    """The problems of a fleet, looked at once a second."""

    def __init__(self, fleet: SeenFleet) -> None:
        self.problems = Problems(_tell)
        self._fleet = fleet

    async def watch(self) -> None:
        """Look, until cancelled."""
        while True:
            self.problems.look(self._fleet.signs(loop_time_s()))
            await asyncio.sleep(LOOK_S)

    def collect(self) -> Iterator[Metric]:
        """One gauge."""
        gauge = GaugeMetricFamily(
            "plait_problem", "1 for what is wrong now: see docs/oncall.md", labels=["code", "about"]
        )
        for problem in self.problems.now:
            gauge.add_metric([problem.code, problem.about], 1.0)
        yield gauge


class StatusApi:
    """The route of this module, for those with `access`."""

    def __init__(self, watched: Watched, access: AdminAccess, forwarding: Forwarding) -> None:
        self._watched = watched
        self._access = access
        self._forwarding = forwarding
        self.routes = [Route(PATH, self._status, methods=["GET"])]

    async def _status(self, request: Request) -> Response:
        self._access.check(request)
        own = self._watched.problems.now
        if self._forwarding.is_alone or is_of_peer(request.scope):
            return _json(own)
        port = (request.scope.get("server") or ("", None))[1]
        asked = Forwarded("GET", PATH, request.scope["headers"], Checked(ADMIN_KEY), port=port)
        told = await self._forwarding.ask_all(asked, MOST_BYTES)
        code = "peer_stale" if self._forwarding.peers.share else "worker_down"
        found = [_of(self._forwarding.peers.own, one) for one in own]
        for name, answer in told.items():
            if answer is None:
                found.append(_unheard(code, name))
            elif answer.status == 200:  # else it is of an earlier version
                found += [_of(name, one) for one in _ANSWER.decode(answer.body).problems]
        oldest: dict[tuple[str, str], Problem] = {}
        for one in sorted(found, key=lambda one: one.since):
            oldest.setdefault((one.code, one.about), one)
        return _json(oldest.values())


class Status(msgspec.Struct):
    """The answer: the oldest problem first."""

    problems: list[Problem]


_ANSWER: Final = msgspec.json.Decoder(Status)


def _of(name: str, problem: Problem) -> Problem:
    """A problem of a gateway of several, which says of which if it is about that one."""
    return problem if problem.about else msgspec.structs.replace(problem, about=name)


def _unheard(code: str, name: str) -> Problem:
    """The problem of a worker or gateway that does not answer."""
    return Problem(code, name, round(time(), 3), f"{name} does not answer.", PART_OF_OTHERS)


def _tell(problem: Problem, begins: bool) -> None:
    write = log.warning if begins else log.info
    write("problem" if begins else "problem over", code=problem.code, about=problem.about, sentence=problem.sentence)


def _json(problems: Iterable[Problem]) -> Response:
    return Response(msgspec.json.encode({"problems": list(problems)}), media_type="application/json")
