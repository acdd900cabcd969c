"""`GET /admin/live`, the stream of what the gateway does, and the page at `/admin/` that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from plait.backends.errors import CallerError
from plait.gateway.admission.admission import Admission
from plait.gateway.api.auth import AdminAccess
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.asgi import UNBUFFERED, ClientGoneError, event, unless_gone
from plait.gateway.fleet.router import Router
from plait.gateway.guests.live.feed import Feed, Watcher
from plait.gateway.guests.live.fleet_snapshot import fleet_news
from plait.gateway.timer import loop_time_s

TICK_S: Final = 0.5
"""The interval of events."""

STUCK_S: Final = 10.0
"""A watcher that does not read for this long is disconnected."""

STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    UNBUFFERED,
]

PAGE_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

PAGE_FILES: Final = {
    "/admin/": ("The live view, a page that shows /admin/live", "index.html", "text/html"),
    "/admin/app.js": ("Its script", "app.js", "text/javascript"),
    "/admin/app.css": ("Its style", "app.css", "text/css"),
    "/admin/icon.svg": ("Its icon", "icon.svg", "image/svg+xml"),
}
"""By the route of a file of the page: its summary, its name in `static/`, and its type."""


class LiveApi:
    """The routes of this module. The stream needs an admin key; the page is public and asks for the key.

    Streams end when the gateway `is_stopping`, or when their key is no longer valid.
    """

    def __init__(
        self,
        router: Router,
        admission: Admission,
        feed: Feed,
        access: AdminAccess,
        *,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._router = router
        self._admission = admission
        self._feed = feed
        self._access = access
        self._is_stopping = is_stopping
        self._fleet, self._fleet_s = b"", 0.0
        self.routes = [
            OwnRoute(
                "GET",
                "/admin/live",
                self._live,
                "The fleet and its calls, as server-sent events; needs the admin key",
            ),
            *(
                OwnRoute("GET", path, partial(self._file, name, kind), summary)
                for path, (summary, name, kind) in PAGE_FILES.items()
            ),
        ]

    async def _live(self, request: Request) -> Response:
        self._access.check(request)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return _Stream(partial(self._watch, request))

    async def _file(self, name: str, media_type: str, request: Request) -> Response:
        self._access.offered(request)
        return Response(_static(name), media_type=media_type, headers=PAGE_HEADERS)

    async def _watch(self, request: Request, send: Send) -> None:
        with self._feed.watching() as watcher:
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            with suppress(CallerError, TimeoutError):  # the key was taken back, or the watcher does not read
                while not self._is_stopping():
                    self._access.check(request)
                    async with asyncio.timeout(STUCK_S):
                        await send({"type": "http.response.body", "body": self._news(watcher), "more_body": True})
                    await asyncio.sleep(TICK_S)
        await send({"type": "http.response.body", "body": b""})  # the server closes what is not read

    def _news(self, watcher: Watcher) -> bytes:
        """The events for a watcher. All watchers share one snapshot of the fleet."""
        now_s = loop_time_s()
        if not self._fleet or now_s - self._fleet_s > TICK_S * 0.8:
            self._fleet = event("fleet", fleet_news(self._router, self._admission, self._feed, now_s))
            self._fleet_s = now_s
        calls = self._feed.news(watcher)
        return self._fleet + event("calls", calls) if calls.calls or calls.left_out else self._fleet


class _Stream(Response):
    """Runs `work`, which sends the answer, until the client disconnects."""

    def __init__(self, work: Callable[[Send], Coroutine[None, None, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGoneError):
            await unless_gone(receive, self._work(send))


def _static(name: str) -> bytes:
    return files("plait.gateway.guests.live").joinpath("static", name).read_bytes()
