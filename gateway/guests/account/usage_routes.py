"""What was used, by the names of OpenAI's usage API: `GET /v1/organization/usage/completions`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.errors import AuthenticationError, CallerError
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.guests.account.books import COUNTS, DAY_S, UsageKey
from plait.gateway.guests.account.prices import UNIT
from plait.gateway.guests.account.usage import Usage

PATH: Final = "/v1/organization/usage/completions"
BUCKETS, MOST_BUCKETS = 7, 31
GROUPS: Final[Mapping[str, str]] = {"project_id": "tenant", "api_key_id": "key", "model": "model", "batch": "batch"}
"""OpenAI's names of what a row of use is of."""

LISTS: Final = {"models": "model", "api_key_ids": "key", "project_ids": "tenant"}
SINGLE: Final = ("start_time", "end_time", "bucket_width", "limit", "page", "batch")


class UsageRoutes:
    """The route of this module. A tenant sees its own use, the admin key that of all.

    `since_s`: the answer says since when use is known; None: it is stored, and was before this process.
    """

    def __init__(
        self, usage: Usage, keys: KeyRing, access: AdminAccess, tenants: TenantIds, since_s: float | None
    ) -> None:
        self._usage = usage
        self._keys = keys
        self._access = access
        self._tenants = tenants
        self._since = {} if since_s is None else {"since": int(since_s)}
        self.routes = [OwnRoute("GET", PATH, self._completions, "What was used, by day")]

    async def _completions(self, request: Request) -> Response:
        tenant, asked = self._tenant(request), request.query_params
        first_day, end_day, limit = _days(asked)
        groups = _all_of(asked, "group_by")
        if not GROUPS.keys() >= {*groups}:
            raise CallerError(f"group_by: expected {', '.join(GROUPS)}.", param="group_by")
        last_day = min(end_day, first_day + limit)
        wanted: dict[str, Collection[object]] = {
            field: given for name, field in LISTS.items() if (given := _all_of(asked, name))
        }
        if "batch" in asked:
            wanted["batch"] = (asked["batch"] == "true",)
        rows: dict[int, list[tuple[UsageKey, Sequence[int]]]] = {day: [] for day in range(first_day, last_day)}
        for row, counts in (await self._usage.of(first_day, last_day, tenant)).items():
            shown = row._replace(tenant=self._tenants.shown(row.tenant))
            if all(getattr(shown, field) in given for field, given in wanted.items()):
                rows[row.day].append((shown, counts))
        has_more = last_day < end_day
        page = {
            "object": "page",
            "data": [_bucket(day, of_day, groups) for day, of_day in rows.items()],
            "has_more": has_more,
            "next_page": f"{last_day}" if has_more else None,
        }
        return _json(page | self._since)

    def _tenant(self, request: Request) -> str | None:
        """The tenant whose use is asked for; None: all. Raises `PlaitError` without a valid key."""
        if self._access.is_offered(request):
            with suppress(AuthenticationError):
                self._access.keys.check(request.scope)
                return None
        return self._tenants.stored(self._keys.check(request.scope))


def _bucket(day: int, rows: Iterable[tuple[UsageKey, Sequence[int]]], groups: Sequence[str]) -> dict[str, Any]:
    sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(COUNTS))
    for row, counts in rows:
        group = tuple(getattr(row, GROUPS[one]) for one in groups)
        sums[group] = [total + one for total, one in zip(sums[group], counts, strict=True)]
    results = [_result(dict(zip(groups, group, strict=True)), counts) for group, counts in sorted(sums.items())]
    return {"object": "bucket", "start_time": day * DAY_S, "end_time": (day + 1) * DAY_S, "results": results}


def _result(group: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """OpenAI's fields, and those that only Plait has: the cost, the engines' seconds, and the estimated requests."""
    requests, prompt, cached, output, cost, engine_us, estimated = counts
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": prompt,
        "input_cached_tokens": cached,
        "input_uncached_tokens": prompt - cached,
        "output_tokens": output,
        "num_model_requests": requests,
        **{name: group.get(name) for name in ("project_id", "user_id", "api_key_id", "model", "batch", "service_tier")},
        "cost": cost / UNIT,
        "engine_seconds": engine_us / 1e6,
        "num_estimated_requests": estimated,
    }


def _days(asked: QueryParams) -> tuple[int, int, int]:
    """The first day from 1970, the day after the last one, and the most buckets. Raises `CallerError`."""
    known = {*SINGLE, *LISTS, "group_by", "user_ids"}
    unknown = {name.removesuffix("[]") for name in asked} - known
    if unknown:
        raise CallerError(f"Unknown: {', '.join(sorted(unknown))}. Use {', '.join(sorted(known))}.")
    if asked.get("bucket_width", "1d") != "1d":
        raise CallerError("bucket_width: expected 1d, because use is kept by UTC day.", param="bucket_width")
    if "start_time" not in asked:
        raise CallerError("start_time is missing: expected seconds from 1970.", param="start_time")
    now = int(time.time())
    start, end = _number(asked, "start_time", 0), _number(asked, "end_time", now + 1)
    limit = _number(asked, "limit", BUCKETS)
    if not 1 <= limit <= MOST_BUCKETS:
        raise CallerError(f"limit: expected a number from 1 to {MOST_BUCKETS}.", param="limit")
    if "end_time" in asked and end <= start:
        raise CallerError("end_time: expected a later time than start_time.", param="end_time")
    return max(start // DAY_S, _number(asked, "page", 0)), -(-min(end, now + DAY_S) // DAY_S), limit


def _number(asked: QueryParams, name: str, usual: int) -> int:
    given = asked.get(name, f"{usual}")
    if not (given.isascii() and given.isdigit() and len(given) < 12):
        raise CallerError(f"{name}: expected a whole number.", param=name)
    return int(given)


def _all_of(asked: QueryParams, name: str) -> list[str]:
    """The values of a list, as `name[]=a&name[]=b`, `name=a&name=b` or `name=a,b`."""
    given = [*asked.getlist(name), *asked.getlist(f"{name}[]")]
    return list(dict.fromkeys(one for some in given for one in some.split(",") if one))


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
