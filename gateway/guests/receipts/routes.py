"""The routes of receipts: a tenant's own, all of them for operators, and `POST /admin/explain`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from heapq import heappush, heappushpop, nlargest
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.errors import CallerError, NotFoundError
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.own_route import OwnRoute, json_answer
from plait.gateway.guests.receipts.receipt import Receipt
from plait.gateway.guests.receipts.receipts import Receipts
from plait.gateway.guests.receipts.view import shown
from plait.gateway.guests.receipts.words import sentences
from plait.gateway.others import ADMIN_KEY, API_KEYS, Checked, Forwarded, Others, is_of_peer

PATH: Final = "/v1/receipts"
ADMIN_PATH: Final = "/admin/receipts"
MOST_BYTES: Final = 2**22
"""The longest answer of another gateway."""

MOST_LISTED: Final = 200
LISTED: Final = 20
AT_ONCE: Final = 500
"""A search yields to the event loop after this many receipts."""

WORST: Final[dict[str, Callable[[Receipt], float]]] = {
    "wait": lambda receipt: receipt.waited_s,
    "late": lambda receipt: receipt.late_s or 0.0,
}

_LIST: Final = msgspec.json.Decoder(dict[str, Any])


class Sought(NamedTuple):
    """What listed receipts have; None: anything."""

    tenant: str | None
    engine: str | None
    code: str | None
    program: str | None


class ReceiptsApi:
    """The routes of this module. A receipt that is not here may be at another worker or gateway, which is asked."""

    def __init__(
        self,
        receipts: Receipts,
        keys: KeyRing,
        access: AdminAccess,
        label: Callable[[str], str],
        others: Others,
    ) -> None:
        self._receipts = receipts
        self._keys = keys
        self._access = access
        self._label = label
        self._others = others
        self.routes = [
            OwnRoute(
                "GET",
                f"{PATH}/{{request_id:path}}",
                self._own,
                "Why a request went where it went, and what came of it",
            ),
            OwnRoute("GET", ADMIN_PATH, self._list, "The receipts of the newest or the worst requests"),
            OwnRoute("GET", f"{ADMIN_PATH}/{{request_id:path}}", self._any, "The receipt of one request"),
        ]

    async def _own(self, request: Request) -> Response:
        tenant, request_id = self._keys.check(request.scope), request.path_params["request_id"]
        receipt = self._receipts.find(tenant, request_id)
        if receipt is not None:
            return json_answer(shown(receipt))
        for body in await self._elsewhere(request, f"{PATH}/{quote(request_id, safe='')}", Checked(API_KEYS, tenant)):
            return json_answer(msgspec.Raw(body))
        raise _unknown(request_id)

    async def _any(self, request: Request) -> Response:
        self._access.check(request)
        request_id = request.path_params["request_id"]
        found = None
        containing = self._receipts.newest(request_id[:128].encode(errors="replace")) if request_id else ()
        for looked, receipt in enumerate(containing):
            if looked % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            if receipt.request_id == request_id[:128] and (found is None or receipt.at > found.at):
                found = receipt
        if found is not None:
            fields = shown(found, self._label)
            return json_answer({**fields, "sentences": list(sentences(fields))})
        target = f"{ADMIN_PATH}/{quote(request_id, safe='')}"
        for body in await self._elsewhere(request, target, Checked(ADMIN_KEY)):
            return json_answer(msgspec.Raw(body))
        raise _unknown(request_id)

    async def _list(self, request: Request) -> Response:
        self._access.check(request)
        asked = request.query_params
        unknown = set(asked) - {*Sought._fields, "worst", "limit"}
        if unknown:
            known = f"{', '.join(Sought._fields)}, worst and limit"
            raise CallerError(f"Unknown: {', '.join(sorted(unknown))}. Use {known}.")
        worst, limit = asked.get("worst"), asked.get("limit", f"{LISTED}")
        if worst is not None and worst not in WORST:
            raise CallerError("worst: expected wait or late.", param="worst")
        if len(limit) > 3 or not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
            raise CallerError(f"limit: expected a number from 1 to {MOST_LISTED}.", param="limit")
        found = [
            (WORST[worst](receipt) if worst else receipt.at, shown(receipt, self._label))
            for receipt in await self._selected(Sought(*map(asked.get, Sought._fields)), worst, int(limit))
        ]
        target = f"{ADMIN_PATH}?{request.url.query}"
        for body in await self._elsewhere(request, target, Checked(ADMIN_KEY)):
            found += [(entry["order"], entry["receipt"]) for entry in _LIST.decode(body)["data"]]
        best = nlargest(int(limit), found, key=lambda entry: entry[0])
        if is_of_peer(request.scope):
            return json_answer({"data": [{"order": order, "receipt": receipt} for order, receipt in best]})
        return json_answer({"object": "list", "data": [receipt for _, receipt in best]})

    async def _selected(self, sought: Sought, worst: str | None, limit: int) -> Sequence[Receipt]:
        """The matching receipts of this gateway: the newest, or the worst by a measure."""
        found: list[tuple[float, int, Receipt]] = []
        measure, looked = WORST[worst] if worst else _at, 0
        tenant, engine, code, program = sought
        for receipt in self._receipts.newest((program or engine or code or "").encode(errors="replace")):
            looked += 1
            if looked % AT_ONCE == 0:
                await asyncio.sleep(0)
            if tenant is not None and self._label(receipt.tenant) != tenant:
                continue
            if engine is not None and all(choice.engine != engine for choice in receipt.choices):
                continue
            if program is not None and receipt.program != program:
                continue
            if code is None or receipt.code == code:
                (heappushpop if len(found) == limit else heappush)(found, (measure(receipt), -looked, receipt))
        return [receipt for *_, receipt in sorted(found, reverse=True)]

    async def _elsewhere(self, request: Request, target: str, checked: Checked) -> Sequence[bytes]:
        """The answers of the other gateways that have matching receipts."""
        if self._others.is_alone or is_of_peer(request.scope):
            return ()
        port = (request.scope.get("server") or ("", None))[1]
        asked = Forwarded("GET", target, request.scope["headers"], checked, port=port)
        told = await self._others.ask_all(asked, MOST_BYTES)
        return [answer.body for answer in told.values() if answer is not None and answer.status == 200]


def _at(receipt: Receipt) -> float:
    return receipt.at


def _unknown(request_id: str) -> NotFoundError:
    text = (
        "No receipt of this request id is kept: it has not ended, or too many came after it, or it is another tenant's."
    )
    return NotFoundError(text, code="receipt_not_found", param=request_id[:128])
