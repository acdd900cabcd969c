"""Accounts as the tests use them: keys that the admin API issues, and what it says that was used."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import httpx

from e2e.server_process import NO_TLS, Server, eventually
from e2e.several_gateways import Gateways
from tests.waiting import WITHIN_S

ADMIN: Final = "the-admin-key"
USAGE: Final = "/v1/organization/usage/completions"
DAY_S: Final = 86_400
HTTP: Final[dict[str, Any]] = {"trust_env": False, "verify": NO_TLS, "timeout": WITHIN_S}
ASKED: Final = 8
"""So many connections reach both of two workers."""


class Made(NamedTuple):
    """An issued key, and its id."""

    key: str
    id: str


def bearer(key: str = ADMIN) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def issue(gateway: Server, tenant: str, **terms: Any) -> Made:
    """A new key of a tenant, once all know it; `terms` are further fields of `POST /admin/keys`."""
    made = gateway.post("/admin/keys", json={"tenant": tenant, **terms}, headers=bearer())
    assert made.status_code == 201, made.text
    key = made.json()["key"]
    eventually(lambda: opens(gateway, key) == {200})
    return Made(key, made.json()["id"])


def opens(gateway: Server, key: str) -> set[int]:
    """What all workers or gateways answer to a request by this key that is no call."""
    asked = gateway.members if isinstance(gateway, Gateways) else [gateway] * ASKED
    with ExitStack() as stack:  # connections that are open at one time are spread over workers
        clients = [stack.enter_context(httpx.Client(base_url=one.url, **HTTP)) for one in asked]
        return {client.get("/v1/models", headers=bearer(key)).status_code for client in clients}


def revoke(gateway: Server, made: Made) -> None:
    done = gateway.request("DELETE", f"/admin/keys/{made.id}", headers=bearer())
    assert done.status_code == 200, done.text


def results(gateway: Server, *group_by: str, key: str = ADMIN, **query: Any) -> list[dict[str, Any]]:
    """What was used since yesterday (a day may begin while a test runs), as far as `key` may know."""
    asked = {"start_time": int(time.time()) - DAY_S, "group_by[]": group_by, **query}
    answer = gateway.get(USAGE, params=asked, headers=bearer(key)).raise_for_status()
    return [result for bucket in answer.json()["data"] for result in bucket["results"]]


class Used(NamedTuple):
    """The sums of some results."""

    requests: int = 0
    input: int = 0
    output: int = 0
    estimated: int = 0


def used(gateway: Server, **query: Any) -> Used:
    """What was used in all, as `results` has it."""
    found = results(gateway, **query)
    names = ("num_model_requests", "input_tokens", "output_tokens", "num_estimated_requests")
    return Used(*(sum(result[name] for result in found) for name in names))


def used_by(gateway: Server, made: Made) -> Used:
    """What one issued key has used."""
    return used(gateway, **{"api_key_ids[]": made.id})
