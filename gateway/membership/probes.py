"""Requests of the monitor to engines, and what their failures mean."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

import httpx
import msgspec

from plait.gateway.config.sections import EngineConfig, UpstreamConfig


class _Paths(msgspec.Struct):
    """The part of an OpenAPI document that counts here."""

    paths: dict[str, msgspec.Raw]


async def got(http: httpx.AsyncClient, path: str, **options: Any) -> httpx.Response:
    """The answer to a GET. Raises `httpx.HTTPError`, also for a status above 399."""
    try:
        response = await http.get(path, **options)
    except AttributeError as error:  # of anyio, if the engine closes the connection while it is made
        raise httpx.ConnectError("the connection was closed while it was made") from error
    response.raise_for_status()
    return response


async def listed_routes(http: httpx.AsyncClient) -> frozenset[str] | None:
    """The paths that an engine has; None if it does not say. Raises `httpx.TransportError`."""
    try:
        response = await got(http, "/openapi.json")
        return frozenset(msgspec.json.decode(response.content, type=_Paths).paths)
    except (httpx.HTTPStatusError, httpx.DecodingError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def probe_client(engine: EngineConfig, upstream: UpstreamConfig) -> httpx.AsyncClient:
    """The connections over which an engine is probed."""
    headers = {"authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    timeout = httpx.Timeout(upstream.connect_timeout_s, read=upstream.probe_timeout_s)
    return httpx.AsyncClient(base_url=engine.url, headers=headers, timeout=timeout, trust_env=False, verify=trust())


@cache
def trust() -> ssl.SSLContext:
    """The system's certificates, loaded once: that takes 20 ms, in which no call goes on."""
    return httpx.create_ssl_context(trust_env=False)


def probe_cause(error: Exception) -> str:
    """The kind of a failed probe, as the log and metrics show it."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return "refused_key" if status in {401, 403} else f"status_{status}"
    return "unreachable" if isinstance(error, httpx.TransportError) else "garbled"


def probe_error(error: Exception) -> str:
    """What went wrong, for people: without the engine's address, since anybody may ask whether the gateway is ready."""
    if not isinstance(error, httpx.HTTPStatusError):
        return str(error) or type(error).__name__
    status, path = error.response.status_code, error.request.url.path
    if status in {401, 403}:
        return key_problem(path, has_key="authorization" in error.request.headers)
    return f"GET {path}: status {status}"


def key_problem(path: str, *, has_key: bool) -> str:
    """What is wrong if an engine answers that we may not ask."""
    return f"GET {path}: the engine {'refuses our key' if has_key else 'asks for a key'}: see api_key"
