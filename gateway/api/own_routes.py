"""ASGI middleware in front of all routes that are no calls: one door for their requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from plait.backends.errors import LimitError, PlaitError
from plait.gateway.asgi import ClientGoneError, OnRefused, id_of, in_parts, send_error
from plait.gateway.calls.annotations import read_annotations
from plait.gateway.calls.routes import CallRoutes
from plait.gateway.intake.open_bodies import ADMIN, OpenBodies

SHARED: Final = "/v1/"
"""The routes of tenants. Operators and health checks have the others, and never wait."""

STRANGER: Final = "stranger"
"""The account of requests without a valid key."""

WAIT_FOR_NOTHING: Final = frozenset((ADMIN, STRANGER))


class OwnRoutes:
    """A tenant's request waits for its turn, and counts until its end. Its steps are charged to the tenant.

    An answer of known length counts among the tenant's open bytes until its client has read it. Answers are sent in
    parts, as their clients read. Each answer names its request. `tenant_of` checks a request's key, `on_refused` is
    called with the errors that this middleware answers, in the form of `calls`.
    """

    def __init__(
        self,
        app: ASGIApp,
        bodies: OpenBodies,
        calls: CallRoutes,
        *,
        tenant_of: Callable[[Scope], str],
        on_refused: OnRefused,
    ) -> None:
        self._app = app
        self._bodies = bodies
        self._calls = calls
        self._tenant_of = tenant_of
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = self._account(scope)
        await self._bodies.turns.charged(tenant, self._answer(tenant, scope, receive, send))

    def _account(self, scope: Scope) -> str:
        """The account that is charged. The application refuses a wrong key."""
        try:
            return self._tenant_of(scope) if scope["path"].startswith(SHARED) else ADMIN
        except PlaitError:
            return STRANGER

    async def _answer(self, tenant: str, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(self._bodies, self._calls, tenant, scope, to_client=send, on_refused=self._on_refused)
        try:
            with ExitStack() as held:
                if tenant not in WAIT_FOR_NOTHING:
                    read_annotations(scope["headers"], None)  # those of an SDK's other calls may be there, if valid
                    await self._bodies.request(scope, tenant, held)
                await self._app(scope, receive, answer.send)
        except ClientGoneError:
            return
        except PlaitError as error:
            if answer.is_refused:
                return
            if answer.has_begun:
                raise
            await answer.refuse(error)
        finally:
            self._bodies.remove(tenant, answer.unread_bytes)


class _Answer:
    """The answer to one request, on its way to the client."""

    def __init__(
        self,
        bodies: OpenBodies,
        calls: CallRoutes,
        tenant: str,
        scope: Scope,
        *,
        to_client: Send,
        on_refused: OnRefused,
    ) -> None:
        self._bodies = bodies
        self._calls = calls
        self._tenant = tenant
        self._scope = scope
        self._to_client = to_client
        self._on_refused = on_refused
        self.has_begun = False
        self.unread_bytes = 0
        self.is_refused = False

    async def send(self, message: Message) -> None:
        if self.is_refused:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
            return
        for part in in_parts(message.get("body", b""), more_body=message.get("more_body", False)):
            await self._to_client(part)
            if part.get("more_body") and self._tenant not in WAIT_FOR_NOTHING:
                await self._bodies.turns.go_on(self._tenant)

    async def _begin(self, head: Message) -> None:
        headers = list(head.get("headers", ()))
        said = dict(headers)
        try:
            size = int(said.get(b"content-length", 0))
            self._bodies.add(self._tenant, size)
        except LimitError as error:
            await self.refuse(error)
            return
        self.has_begun, self.unread_bytes = True, size
        if b"x-request-id" not in said:
            headers.append((b"x-request-id", id_of(self._scope).encode("latin-1")))
        await self._to_client({**head, "headers": headers})

    async def refuse(self, error: PlaitError) -> None:
        """Answer with an error instead."""
        self.is_refused = True
        self._on_refused(self._scope, error)
        await send_error(
            self._to_client, error, id_of(self._scope), self._calls.errors_of(self._scope["path"]).body(error)
        )
