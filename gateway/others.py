"""What the parts of a gateway know of other gateways that serve the same clients: workers, or members of one store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Protocol

from starlette.types import Receive, Scope, Send

from plait.gateway.asgi import Headers

CHECKED: Final = "plait.checked"
"""The key in the ASGI scope for the `Checked` of a forwarded request."""

API_KEYS, ADMIN_KEY, METRICS_KEY, PEER_KEY = "api_keys", "admin_key", "metrics_key", "peer_key"
"""The names of key rings, which are those of their settings. The last is for gateways' own requests."""


class Checked(NamedTuple):
    """How the first gateway has authenticated a request: the `KeyRing`'s name, the tenant's identity, the key's id."""

    ring: str
    tenant: str = ""
    key: str = ""


OF_ANYBODY: Final = Checked(API_KEYS)
"""A request to a gateway without API keys. A key in it is for the engines."""


def is_of_peer(scope: Scope) -> bool:
    """Whether another gateway has forwarded the request, so that it must not be forwarded again."""
    return CHECKED in scope


class Forwarded(NamedTuple):
    """A request for another gateway. `target` is path and query, `port` the one that the client connected to."""

    method: str
    target: str
    headers: Headers
    checked: Checked
    body: bytes = b""
    port: int | None = None

    @property
    def may_begin(self) -> bool:
        """Whether the request may create its session: only bodies name new sessions, paths name existing ones."""
        return bool(self.body)


class Told(NamedTuple):
    """Another gateway's answer."""

    status: int
    body: bytes


class Workers(Protocol):
    """The processes of one machine that serve the same clients."""

    @property
    def count(self) -> int: ...

    @property
    def index(self) -> int:
        """The place of this process among them, from 0 on."""


class SessionsHere(Protocol):
    def has(self, tenant: str, session_id: str) -> bool:
        """Whether a session is here."""


class ResponsesHere(Protocol):
    def has(self, tenant: str, response_id: str) -> bool:
        """Whether a response is stored here, or generated here in the background."""

    def stream(self, tenant: str, response_id: str) -> tuple[str, str, str]:
        """The response's stream in the store."""


class Others:
    """The other gateways. This class is for a gateway that has none."""

    own = "0"
    """This gateway's name."""

    is_alone = True

    are_workers = False
    """Whether they are processes of one machine, without a shared store."""

    missed: Mapping[str, float] = {}
    """By address: the gateways that have died, and when, in seconds from 1970."""

    odd: Mapping[str, tuple[str, str]] = {}
    """By address: the gateways that are sent nothing, with the code of a problem and its sentence."""

    def described(self) -> Mapping[str, Any]:
        """What `/ready` says of them."""
        return {}

    def is_own(self, tenant: str, session: str) -> bool:  # noqa: ARG002
        """Whether this gateway may create a tenant's session with this id, where they divide the ids."""
        return True

    async def ask_all(self, request: Forwarded, max_bytes: int) -> Mapping[str, Told | None]:  # noqa: ARG002
        """Their answers, by name; None for one that is silent."""
        return {}

    async def holder(self, stream: tuple[str, str, str], path: str, headers: Headers) -> str | None:  # noqa: ARG002
        """The one that has a stream of the store: its kind, tenant and name. None: none has it.

        Where they share no store, each is asked for `path`. Raises `PlaitError` while it cannot be known.
        """
        return None

    async def forward(self, name: str, request: Forwarded, receive: Receive, send: Send) -> None:
        """Have one of them answer a request. Raises `PeerUnavailableError` and `ClientGoneError`."""
        raise NotImplementedError
