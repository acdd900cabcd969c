"""Records requests that never became calls: on a call's route as an ended call, on any other route in the log."""

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
from plait.gateway.calls.routes import CallRoutes
from plait.gateway.fleet.served_models import ServedModels
from plait.gateway.timer import loop_time_s

MOST_READ_BYTES = 2**20
"""In a longer body, the name of the model is not looked for."""

log = structlog.get_logger(__name__)


class _ModelNamed(msgspec.Struct):
    """The part of a body that names the model."""

    model: str = ""


_NAMED = msgspec.json.Decoder(_ModelNamed)


class Refusals:
    """Records each request that never became a call, once. A path may begin with `root_path`."""

    def __init__(
        self,
        records: CallRecords,
        metrics: CallMetrics,
        gate: Gate,
        models: ServedModels,
        keys: KeyRing,
        *,
        calls: CallRoutes,
        root_path: str = "",
    ) -> None:
        self._records = records
        self._metrics = metrics
        self._gate = gate
        self._models = models
        self._keys = keys
        self._calls = calls
        self._root_path = root_path

    def no_call(self, incoming: Incoming, error: BaseException | None, *, status: int | None = None) -> None:
        """Record a request on a call's route that became no call. `status` is as in `refused`.

        A client's error counts against the tenant's rate of calls.
        """
        if isinstance(error, asyncio.CancelledError):  # only a stopping gateway cancels requests
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
        """Record an error before routing. If the request could not be parsed, the scope has no path."""
        path: str = scope.get("path", "")
        if path.removeprefix(self._root_path) not in self._calls:
            self.elsewhere(scope, error)
            return
        try:
            tenant = self._keys.check(scope)
        except PlaitError:
            tenant = ""
        path = path.removeprefix(self._root_path)
        self.no_call(Incoming(path, scope["headers"], b"", id_of(scope), loop_time_s(), tenant), error)

    def elsewhere(self, scope: Scope, error: PlaitError) -> None:
        """Record an error on a route that is not a call's."""
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
        """Record an error that the outermost middleware answers. On a call's route, the request is recorded already."""
        if scope["path"].removeprefix(self._root_path) not in self._calls:
            self.elsewhere(scope, error)

    def _model_in(self, body: bytes) -> str:
        """The served model that a body names; empty if it names none."""
        if not 0 < len(body) <= MOST_READ_BYTES:
            return ""
        try:
            name = _NAMED.decode(body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return ""
        return self._models.shown(name) if name else ""
