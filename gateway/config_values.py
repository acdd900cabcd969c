"""The kinds of values in the configuration, with what an error message calls them, and addresses."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

Text = Annotated[str, Meta(min_length=1, description="a string that is not empty")]
# Used in headers and metric labels.
Token = Annotated[str, Meta(pattern=r"^[!-~]+\Z", description="printable ASCII without spaces")]
RootPath = Annotated[
    str, Meta(pattern=r"^((/[A-Za-z0-9._~-]+)+)?\Z", description="a path such as /llm, without a slash at its end")
]
Origin = Annotated[str, Meta(pattern=r"^(\*|https?://[^\s/]+)\Z", description='an origin such as https://host, or "*"')]
Port = Annotated[int, Meta(ge=0, le=65_535, description="a port, 0 to 65535")]
ListenerPort = Annotated[int, Meta(gt=0, le=65_535, description="a port, 1 to 65535")]
Positive = Annotated[int, Meta(gt=0, description="an integer above 0")]
NotNegative = Annotated[int, Meta(ge=0, description="an integer, 0 or more")]
# The upper bound excludes infinity, which timers refuse.
Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds above 0")]
SecondsOrZero = Annotated[float, Meta(ge=0, le=1e9, description="a number of seconds, 0 or more")]
Rate = Annotated[float, Meta(ge=0, le=1e9, description="a number, 0 or more")]
Weight = Annotated[float, Meta(ge=1e-3, le=1e6, description="a number from 0.001 to 1000000")]


SECRET_KEYS = frozenset({"admin_key", "api_key", "api_keys", "metrics_key"})
HOST = re.compile(r"[A-Za-z0-9_.-]+|([0-9A-Fa-f]*:){2,}[0-9A-Fa-f.]*")  # a name or IPv4 address, or an IPv6 address
_URL = re.compile(r"(https?)://([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?(/[A-Za-z0-9._~%/-]*)?")


def base_url(url: str) -> tuple[str, str]:
    """An engine's url without default port and trailing slash, and its host:port."""
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
    if path.endswith("/v1"):
        raise ValueError(f"url = {shown(url)}: expected the engine's root, without /v1")
    return f"{scheme}://{host if port == default_port else f'{host}:{port}'}{path}", f"{host}:{port}"


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
