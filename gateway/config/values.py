"""Types of the configuration's values, each with a description for error messages; checks of URLs and header names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from msgspec import Meta

from plait.backends.protocol.cache_state import MAX_RANKS

Text = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
# For values in headers and metric labels.
Token = Annotated[str, Meta(pattern=r"^[!-~]+\Z", description="printable ASCII without spaces")]
SECRET_PATTERN = r"^[!-~]{32,}\Z"  # noqa: S105 - no secret
Secret = Annotated[
    str, Meta(pattern=SECRET_PATTERN, description="32 or more characters of printable ASCII without spaces")
]
RootPath = Annotated[
    str, Meta(pattern=r"^((/[A-Za-z0-9._~-]+)+)?\Z", description="a path such as /llm, without a slash at its end")
]
Origin = Annotated[str, Meta(pattern=r"^(\*|https?://[^\s/]+)\Z", description='an origin such as https://host, or "*"')]
HeaderName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.-]+\Z", description="the name of one header, such as x-vendor-id")
]
Port = Annotated[int, Meta(ge=0, le=65_535, description="a port, 0 to 65535")]
ListenerPort = Annotated[int, Meta(gt=0, le=65_535, description="a port, 1 to 65535")]
Positive = Annotated[int, Meta(gt=0, description="an integer above 0")]
Ranks = Annotated[int, Meta(gt=0, le=MAX_RANKS, description=f"an integer from 1 to {MAX_RANKS}")]
NotNegative = Annotated[int, Meta(ge=0, description="an integer, 0 or more")]
# The upper bound excludes infinity, which timers refuse.
Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds above 0")]
SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds, 0 or more")]
Rate = Annotated[float, Meta(ge=0, le=1e9, description="a number, 0 or more")]
Amount = Annotated[float, Meta(gt=0, le=1e9, description="an amount above 0")]
Price = Annotated[float, Meta(ge=0, le=1e6, description="a price for a million tokens, 0 or more")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Weight = Annotated[float, Meta(ge=1e-3, le=1e6, description="a number from 0.001 to 1000000")]

Options = Annotated[dict[str, Any], Meta(description="a table")]


_HOP = dict.fromkeys(
    (
        "connection", "content-length", "expect", "host", "keep-alive", "proxy-authenticate", "proxy-authorization",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
    ),
    "it belongs to one connection",
)  # fmt: skip
_BY_GATEWAY = "the gateway sets it itself"
_OURS = {"x-request-id": _BY_GATEWAY}
NEVER_TO_ENGINES = {
    **_HOP,
    **_OURS,
    "accept-encoding": "the gateway has to read the answer",
    "x-data-parallel-rank": "the gateway chooses the rank",
    **dict.fromkeys(
        ("api-key", "authorization", "cookie", "x-api-key"),
        "secrets of clients stay here; an engine's own key is its api_key",
    ),
}
"""Headers of clients' requests that are never passed on, and why."""

NEVER_TO_CLIENTS = {
    **_HOP,
    **_OURS,
    **dict.fromkeys(("date", "retry-after", "retry-after-ms", "x-accel-buffering", "x-should-retry"), _BY_GATEWAY),
    **dict.fromkeys(("set-cookie", "www-authenticate"), "an engine's secrets are between it and the gateway"),
    **dict.fromkeys(
        ("alt-svc", "content-location", "location", "server", "strict-transport-security", "via"),
        "it is about the engine's address",
    ),
}
"""Headers of engines' answers that are never passed on, and why. Their values are for the gateway alone."""

SECRET_KEYS = frozenset({"admin_key", "api_key", "api_keys", "metrics_key", "options", "peer_key", "secret"})
RANK_NAME = re.compile(r"@[0-9]+\Z")
HOST = re.compile(r"[A-Za-z0-9_.-]+|([0-9A-Fa-f]*:){2,}[0-9A-Fa-f.]*")  # a name or IPv4 address, or an IPv6 address
_URL = re.compile(r"(https?)://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(/[A-Za-z0-9._~%/-]*)?")


def passable(key: str, names: Iterable[str], never: Mapping[str, str]) -> tuple[str, ...]:
    """The header `names` of the configuration's `key`, in lower case. Raises ValueError for one that must not pass."""
    lowered = [name.lower() for name in names]
    for number, name in enumerate(lowered):
        reason = never.get(name)
        if name.startswith("plait-"):
            reason = "only Plait sets headers that begin with plait-"
        elif name.startswith("access-control-"):
            reason = "cors_origins of [server] says which pages may read answers"
        if reason is not None:
            raise ValueError(f"{key}[{number}] = {shown(name)}: expected a header that may pass; {reason}")
    return tuple(lowered)


def base_url(url: str) -> tuple[str, str]:
    """An engine's url without default port and trailing slash, and its host:port."""
    if re.search(r":[0-9]+@[0-9]+/*\Z", url):
        raise ValueError("url ends in a rank: leave @ and the number out, the gateway finds the ranks behind a url")
    if "@" in url:  # not shown: it holds a password
        raise ValueError("url holds credentials: expected a url without them; put the engine's key into api_key")
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"url = {shown(url)}: expected http://HOST:PORT or https://HOST:PORT")
    scheme, host, path = match[1], match[2].lower(), (match[4] or "").rstrip("/")
    default_port = 80 if scheme == "http" else 443
    port = int(match[3] or default_port)
    if not 0 < port <= 65_535:
        raise ValueError(f"url = {shown(url)}: expected a port from 1 to 65535")
    if re.search(r"/v1(/chat)?(/completions|/models|/responses)?\Z", path):
        raise ValueError(f"url = {shown(url)}: expected the engine's root, without /v1")
    return f"{scheme}://{host if port == default_port else f'{host}:{port}'}{path}", f"{host}:{port}"


def root_url(key: str, url: str) -> str:
    """A gateway's url without default port and trailing slash. Error messages begin with `key`."""
    try:
        return base_url(url)[0]
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def shown(value: object, key: str = "") -> str:
    """A value as an error message shows it: short, and never an API key."""
    if re.split(r"[.\[]", key.rstrip("]0123456789["))[-1] in SECRET_KEYS:
        return "(hidden)"
    if isinstance(value, Mapping):
        return "(a table)"
    if isinstance(value, list | tuple):
        return "(an array)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:80]}..."
