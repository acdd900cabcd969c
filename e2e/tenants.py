"""The two tenants of a gateway, and what they send to it without the SDK."""

from __future__ import annotations

from typing import Any

import httpx

from e2e.servers import Fleet

KEYS = ["tenant-one", "tenant-two"]


def post(fleet: Fleet, path: str, body: dict[str, Any], key: str = KEYS[0]) -> httpx.Response:
    """The answer to one tenant, the first unless `key` is another's."""
    return fleet.gateway.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def get(fleet: Fleet, session: str, variable: str, **more: Any) -> httpx.Response:
    """The answer when the variable is set or has failed; `more` are other fields of the request."""
    return post(fleet, "/v1/get", {"session_id": session, "semantic_var_id": variable, **more})
