"""Two optional layers in front of all routes: removal of a proxy's path prefix, and CORS for browsers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]

SHOWN_HEADERS = (
    "x-request-id", "request-id", "retry-after", "plait-engine", "plait-placement", "plait-cached-tokens",
    "plait-loaded-tokens", "plait-waited-s", "plait-slo", "plait-session", "plait-session-position", "plait-ignored",
)  # fmt: skip
"""The headers of an answer that the script of a page may read (CORS)."""


def behind_a_proxy(app: App, root_path: str, cors_origins: Sequence[str]) -> App:
    """Wrap `app`: paths may begin with `root_path` or lack it, and pages of `cors_origins` may send requests."""
    if root_path:
        app = _without_prefix(app, root_path)
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=SHOWN_HEADERS,
        )
    return app


def _without_prefix(app: App, root_path: str) -> App:
    def stripped(scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        path = scope.get("path", "")
        if path.startswith(root_path) and path[len(root_path) :].startswith("/"):
            scope = {**scope, "path": path[len(root_path) :]}
        return app(scope, receive, send)

    return stripped
