"""Requests that are answered with an error: those to a call's route end as calls do, all others have a line here."""

from __future__ import annotations

import asyncio

import msgspec
import structlog
from starlette.types import Scope

from plait.backends.errors import (
    AuthenticationError,
    CallerError,
    ConflictError,
    GatewayStoppingError,
    LimitError,
    PlaitError,
)
from plait.gateway.api.auth import KeyRing
from plait.gateway.asgi import id_of
from plait.gateway.calls.call_reader import Incoming
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.records import CallRecords, refused
from plait.gateway.calls.routes import ROUTES
from plait.gateway.fleet.served_models import ServedModels
from plait.gateway.timer import loop_time_s

MOST_READ_BYTES = 2**20
"""A longer body is not read for the name of its model."""

log = structlog.get_logger(__name__)


class _ModelNamed(msgspec.Struct):
    """What of a body says which model is meant."""

    model: str = ""


_NAMED = msgspec.json.Decoder(_ModelNamed)


class Refusals:
    """Records requests that are no calls, each once. A path may begin with `root_path`."""

    def __init__(
        self,
        records: CallRecords,
        metrics: CallMetrics,
        gate: Gate,
        models: ServedModels,
        keys: KeyRing,
        *,
        root_path: str = "",
    ) -> None:
        self._records = records
        self._metrics = metrics
        self._gate = gate
        self._models = models
        self._keys = keys
        self._root_path = root_path

    def no_call(self, incoming: Incoming, error: BaseException | None, *, status: int = 200) -> None:
        """A request to a call's route has ended by an error, or with another request's answer of this status.

        One that was wrong counts for its tenant's rate of calls. One is cancelled only where the gateway stops.
        """
        if isinstance(error, asyncio.CancelledError):
            error = GatewayStoppingError()
        if isinstance(error, CallerError) and not isinstance(error, LimitError | ConflictError | AuthenticationError):
            self._gate.spend(incoming.tenant)
        self._records.no_call(
            refused(
                incoming.request_id,
                incoming.path,
                incoming.tenant,
                self._model_in(incoming.body),
                arrived_s=incoming.arrived_s,
                error=error,
                status=status,
            )
        )

    def unread(self, scope: Scope, error: PlaitError) -> None:
        """A request is answered with an error before its route has it. Its scope is that of ASGI, or has no path."""
        path: str = scope.get("path", "")
        if path.removeprefix(self._root_path) not in ROUTES:
            self.elsewhere(scope, error)
            return
        try:
            tenant = self._keys.check(scope)
        except AuthenticationError:
            tenant = ""
        path = path.removeprefix(self._root_path)
        self.no_call(Incoming(path, scope["headers"], b"", id_of(scope), loop_time_s(), tenant), error)

    def elsewhere(self, scope: Scope, error: PlaitError) -> None:
        """A request to a route that is no call's, or to none, is answered with an error."""
        path = scope.get("path")
        log.info(
            "request refused",
            request_id=id_of(scope),
            path=path,
            status=error.status,
            code=error.shown_code,
            message=error.logged_message,
        )
        self._metrics.refused(error)

    def outermost(self, scope: Scope, error: PlaitError) -> None:
        """What serves all routes answers a request with an error. A call has its line by then."""
        if scope["path"].removeprefix(self._root_path) not in ROUTES:
            self.elsewhere(scope, error)

    def _model_in(self, body: bytes) -> str:
        """The model that a body names; empty if it names none, or none that is served here."""
        if not 0 < len(body) <= MOST_READ_BYTES:
            return ""
        try:
            name = _NAMED.decode(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ""
        return self._models.shown(name) if name else ""
