"""`GET /admin/status` of all workers and gateways: these, problems, engines, waiting calls by model and tenant.

Problems are also in the gauge `plait_problem` and in lines of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha512
from hmac import digest
from importlib.metadata import version
from itertools import chain
from time import time
from typing import Final, TypeVar

import msgspec
import structlog
from msgspec.structs import astuple, replace
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from plait.gateway.api.auth import AdminAccess
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.guests.live.fleet_snapshot import engine_state
from plait.gateway.guests.live.problems import Problem, Problems, Signs
from plait.gateway.guests.live.signs import SeenFleet
from plait.gateway.others import ADMIN_KEY, Checked, Forwarded, Others, is_of_peer
from plait.gateway.timer import loop_time_s

PATH: Final = "/admin/status"
PART_OF_OTHERS: Final = "a-gateway-dies"
"""The part of docs/oncall.md for gateways that do not answer."""

LOOK_S: Final = 1.0
MOST_BYTES: Final = 2**22
VERSION: Final = version("plait")
OTHER_SECRET: Final = "{} has another server.secret: tenants are others there, and sealed thoughts are lost."  # noqa: S105 - a sentence

log = structlog.get_logger(__name__)


class GatewayRow(msgspec.Struct):
    """A gateway or worker. Times are in seconds from 1970.

    `store` is the kind of its store (empty: none), which cannot be written since `failing_since` (0: it can).
    """

    name: str
    version: str
    since: float
    store: str = ""
    failing_since: float = 0.0


class EngineRow(msgspec.Struct):
    """An engine. `state` is its health, `handing over` or `draining`, `since` in seconds from 1970 (0: not known).

    `calls` are on the engine, or in its line. `reason` is why its latest probe failed, `kv_tokens` the KV cache's size.
    """

    name: str
    state: str
    cause: str
    since: float
    calls: int
    reason: str = ""
    kv_tokens: int | None = None
    kv_used_tokens: int = 0


class ModelRow(msgspec.Struct):
    name: str
    waiting_calls: int
    held_sessions: int


class TenantRow(msgspec.Struct):
    """A tenant. Answered calls, calls that engines failed, and tokens count since the gateway's start."""

    name: str
    waiting_calls: int
    answered_calls: int
    failed_calls: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    weight: float = 1.0


class Status(msgspec.Struct):
    """The answer: the oldest problem first."""

    problems: list[Problem]
    engines: list[EngineRow]
    models: list[ModelRow]
    tenants: list[TenantRow]

    secret: str = ""
    """The fingerprint of the server's secret."""

    refused_reload: list[str] = []
    """The problems of the configuration that was read last, if it was refused."""

    gateways: list[GatewayRow] = []


_ANSWER: Final = msgspec.json.Decoder(Status)
RowT = TypeVar("RowT", EngineRow, ModelRow, TenantRow)
CountsT = TypeVar("CountsT", ModelRow, TenantRow)


class Watched(Collector):
    """The problems of a fleet, looked at once a second."""

    def __init__(self, fleet: SeenFleet) -> None:
        self.problems = Problems(_tell)
        self._fleet = fleet
        self._draining_since: dict[str, float] = {}
        self._begun_at = round(time(), 3)

    async def watch(self) -> None:
        while True:
            self.look(loop_time_s())
            await asyncio.sleep(LOOK_S)

    def look(self, now_s: float) -> None:
        signs = self._fleet.signs(now_s)
        self.problems.look(signs)
        draining = [name for name, engine in signs.engines.items() if engine.draining]
        self._draining_since = {name: self._draining_since.get(name, signs.wall_s) for name in draining}

    def collect(self) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(
            "plait_problem", "1 for what is wrong now: see docs/oncall.md", labels=["code", "about"]
        )
        for problem in self.problems.now:
            gauge.add_metric([problem.code, problem.about], 1.0)
        yield gauge

    def status(self, name: str = "") -> Status:
        """What the gateway of this name sees."""
        signs, router, store = self._fleet.signs(loop_time_s()), self._fleet.router, self._fleet.store
        failing = (one.since for one in self.problems.now if one.code == "store_failing")
        return Status(
            list(self.problems.now),
            [self._engine(name, engine) for name, engine in router.engines.items()],
            [ModelRow(name, model.waiting, model.held_sessions) for name, model in signs.models.items()],
            list(self._tenants(signs)),
            refused_reload=self._fleet.reloads.refused,
            gateways=[GatewayRow(name, VERSION, self._begun_at, store.kind, next(failing, 0.0))],
        )

    def _engine(self, name: str, engine: FleetEngine) -> EngineRow:
        state, cause, since = engine.health.state.value, engine.health.cause, engine.health_since
        if engine.draining:
            state, cause, since = "draining", "", self._draining_since.get(name, 0.0)
        elif name in self._fleet.router.hand_over:
            state, cause, since = "handing over", "", 0.0
        kv, why = engine_state(engine, self._fleet.router.block_tokens), engine.why_down
        used = kv.cached_tokens if kv.kv_used_tokens is None else kv.kv_used_tokens
        return EngineRow(name, state, cause, round(since, 3), engine.view.outstanding, why, kv.kv_tokens, used)

    def _tenants(self, signs: Signs) -> Iterator[TenantRow]:
        fleet = self._fleet
        prompt, output = fleet.metrics.tokens_of_tenants()
        weights = {fleet.label(tenant): weight for tenant, weight in fleet.admission.shares.weights.items()}
        for name in sorted(set().union(*signs.tenants)):
            waiting, answered, failed = (counts.get(name, 0) for counts in signs.tenants)
            tokens = prompt.get(name, 0), output.get(name, 0)
            yield TenantRow(name, waiting, answered, failed, *tokens, weights.get(name, 1.0))


class StatusApi:
    def __init__(self, watched: Watched, access: AdminAccess, others: Others, secret: str) -> None:
        self._secret = secret
        self._watched = watched
        self._access = access
        self._others = others
        self.routes = [OwnRoute("GET", PATH, self._status, "What is wrong now, the engines, and what waits")]

    async def _status(self, request: Request) -> Response:
        self._access.check(request)
        status = replace(self._watched.status(self._others.own), secret=self._secret)
        if not self._others.is_alone and not is_of_peer(request.scope):
            status = await self._of_all(status, request)
        return json_answer(status)

    async def _of_all(self, own: Status, request: Request) -> Status:
        port = (request.scope.get("server") or ("", None))[1]
        asked = Forwarded("GET", PATH, request.scope["headers"], Checked(ADMIN_KEY), port=port)
        told = await self._others.ask_all(asked, MOST_BYTES)
        code = "worker_down" if self._others.are_workers else "peer_stale"
        found = [_named(self._others.own, own)]
        for name, answer in told.items():
            if answer is None:
                found.append(Status([_problem(code, name, f"{name} does not answer.")], [], [], []))
            elif answer.status == 200:
                with suppress(msgspec.ValidationError):  # of another version
                    found.append(_named(name, _ANSWER.decode(answer.body)))
                    if found[-1].secret != own.secret:
                        found.append(Status([_problem("secret_differs", name, OTHER_SECRET.format(name))], [], [], []))
        return merged(found)


def fingerprint(secret: bytes) -> str:
    """Eight digits that gateways with the same secret have in common, also with those of 0.2.0."""
    return digest(digest(secret, b"plait-thoughts", sha512), b"fingerprint", sha512).hex()[:8]


def merged(found: Sequence[Status]) -> Status:
    """The status of several gateways together. Calls are summed; an engine drains if it does in all of them."""
    oldest: dict[tuple[str, str], Problem] = {}
    for problem in sorted((one for status in found for one in status.problems), key=lambda one: one.since):
        oldest.setdefault((problem.code, problem.about), problem)
    return Status(
        list(oldest.values()),
        [
            replace(min(rows, key=_precedence), calls=sum(row.calls for row in rows))
            for rows in _by_name(status.engines for status in found)
        ],
        [_summed(rows) for rows in _by_name(status.models for status in found)],
        [replace(_summed(rows), weight=rows[0].weight) for rows in _by_name(status.tenants for status in found)],
        refused_reload=list(dict.fromkeys(problem for status in found for problem in status.refused_reload)),
        gateways=sorted((row for status in found for row in status.gateways), key=lambda row: row.name),
    )


def _by_name(tables: Iterable[Sequence[RowT]]) -> Iterable[Sequence[RowT]]:
    found: dict[str, list[RowT]] = {}
    for row in chain.from_iterable(tables):
        found.setdefault(row.name, []).append(row)
    return found.values()


def _summed(rows: Sequence[CountsT]) -> CountsT:
    counts = zip(*(astuple(row)[1:] for row in rows), strict=True)
    return type(rows[0])(rows[0].name, *map(sum, counts))


def _precedence(row: EngineRow) -> tuple[bool, bool, float]:
    """A sort key: where gateways differ, the first state is shown. Out comes before up, draining last."""
    return row.state == "draining", row.state == "up", row.since


def _named(name: str, status: Status) -> Status:
    """The status of one gateway of several: its problems with itself get its name."""
    return replace(status, problems=[one if one.about else replace(one, about=name) for one in status.problems])


def _problem(code: str, name: str, sentence: str) -> Problem:
    """A problem with another gateway, found now."""
    return Problem(code, name, round(time(), 3), sentence, PART_OF_OTHERS)


def _tell(problem: Problem, begins: bool) -> None:
    write = log.warning if begins else log.info
    write("problem" if begins else "problem over", code=problem.code, about=problem.about, sentence=problem.sentence)
