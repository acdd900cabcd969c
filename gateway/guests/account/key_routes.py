"""The routes by which operators issue, list, change and revoke API keys."""

from __future__ import annotations

import re
import time
from secrets import token_hex
from typing import Any, Final

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from plait.backends.errors import CallerError, ConflictError, NotFoundError
from plait.backends.protocol.client_bodies import mended
from plait.backends.protocol.openai import decode_body
from plait.gateway.api.auth import AdminAccess
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.config.sections import BudgetConfig
from plait.gateway.config.values import Positive, Rate, Text
from plait.gateway.guests.account.books import Ledger, StoredKey
from plait.gateway.guests.account.keys import RECORD, KeyRecord, Keys, digest_of, new_key
from plait.gateway.intake.open_bodies import ADMIN, MOST_ADMIN_BYTES, OpenBodies
from plait.gateway.others import ADMIN_KEY

PATH: Final = "/admin/keys"
ID: Final = re.compile(r"key_[0-9a-f]{16}")
SHOWN_CHARACTERS: Final = 8
LISTED: Final = 100
MOST_LISTED: Final = 1000

log = structlog.get_logger(__name__)


class ChangedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`POST /admin/keys/{id}`: what is left out stays, null removes. Limits are as in [[tenants]].

    `models`: those that the key may call, none for all.
    """

    name: str | msgspec.UnsetType = msgspec.UNSET
    expires_in_s: Positive | msgspec.UnsetType | None = msgspec.UNSET
    models: tuple[Text, ...] | msgspec.UnsetType = msgspec.UNSET
    calls_per_s: Rate | msgspec.UnsetType | None = msgspec.UNSET
    tokens_per_s: Rate | msgspec.UnsetType | None = msgspec.UNSET
    budget: BudgetConfig | msgspec.UnsetType | None = msgspec.UNSET

    def given(self, now: int) -> dict[str, Any]:
        """The fields of a record that are given."""
        fields = {one: value for one in FIELDS if (value := getattr(self, one)) is not msgspec.UNSET}
        if "expires_in_s" in fields:
            for_s = fields.pop("expires_in_s")
            fields["expires_at"] = None if for_s is None else now + for_s
        return fields


FIELDS: Final = ChangedKey.__struct_fields__


class GivenKey(ChangedKey, frozen=True, kw_only=True):
    """`POST /admin/keys`."""

    tenant: Text


class KeyRoutes:
    """The routes of this module. Without `is_stored`, no key is issued: it would end with the process."""

    def __init__(self, keys: Keys, ledger: Ledger, access: AdminAccess, bodies: OpenBodies, *, is_stored: bool) -> None:
        self._keys = keys
        self._ledger = ledger
        self._access = access
        self._bodies = bodies
        self._is_stored = is_stored
        one = f"{PATH}/{{key_id}}"
        self.routes = [
            OwnRoute("GET", PATH, self._list, "The issued API keys"),
            OwnRoute("POST", PATH, self._create, "Issue an API key, which only this answer has"),
            OwnRoute("GET", one, self._show, "One API key"),
            OwnRoute("POST", one, self._change, "Change an API key"),
            OwnRoute("DELETE", one, self._revoke, "Revoke an API key"),
        ]  # fmt: skip

    async def _list(self, request: Request) -> Response:
        self._access.check(request)
        asked = request.query_params
        tenant, after, limit = asked.get("tenant"), asked.get("after"), asked.get("limit", f"{LISTED}")
        if len(limit) > 4 or not limit.isdecimal() or not 1 <= int(limit) <= MOST_LISTED:
            raise CallerError(f"limit: expected a number from 1 to {MOST_LISTED}.", param="limit")
        keys = [(RECORD.decode(row.record), row) for row in await self._ledger.ask(self._ledger.books.keys, 0)]
        found = [_shown(*one) for one in keys if tenant in {None, one[0].tenant}]
        found.sort(key=lambda one: (-one["created_at"], one["id"]))
        ids = [one["id"] for one in found]
        if after is not None and after not in ids:
            raise CallerError("after: expected the id of a key in the list.", param="after")
        begin = 0 if after is None else ids.index(after) + 1
        end = begin + int(limit)
        return _json({"object": "list", "data": found[begin:end], "has_more": end < len(found)})

    async def _create(self, request: Request) -> Response:
        body: GivenKey = await self._read(request, GivenKey)
        if not self._is_stored:
            raise CallerError("Keys are kept in the store: set [store] path or url.", code="no_store")
        if body.tenant not in self._keys.tenants:
            raise NotFoundError(f"[[tenants]] has no '{body.tenant}'.", code="tenant_not_found", param="tenant")
        now, key = int(time.time()), new_key()
        key_id, shown, digest = f"key_{token_hex(8)}", key[:SHOWN_CHARACTERS], digest_of(key)
        made = KeyRecord(key_id, body.tenant, shown, now, ADMIN_KEY, **body.given(now))
        await self._keys.write(digest, made)
        log.info("key issued", key=made.id, tenant=made.tenant, by=ADMIN_KEY)
        return _json({**_shown(made), "key": key}, 201)

    async def _show(self, request: Request) -> Response:
        self._access.check(request)
        return _json(_shown(*await self._found(request)))

    async def _change(self, request: Request) -> Response:
        body: ChangedKey = await self._read(request, ChangedKey)
        record, stored = await self._found(request)
        if record.revoked_at is not None:
            raise ConflictError("This key was revoked: issue another one.", code="conflict")
        given = body.given(int(time.time()))
        record = msgspec.structs.replace(record, **given)
        await self._keys.write(stored.digest, record)
        log.info("key changed", key=record.id, tenant=record.tenant, changed=sorted(given), by=ADMIN_KEY)
        return _json(_shown(record, stored))

    async def _revoke(self, request: Request) -> Response:
        self._access.check(request)
        record, stored = await self._found(request)
        if record.revoked_at is None:
            record = msgspec.structs.replace(record, revoked_at=int(time.time()))
            await self._keys.write(stored.digest, record)
            log.info("key revoked", key=record.id, tenant=record.tenant, by=ADMIN_KEY)
        return _json({"object": "key.deleted", "id": record.id, "deleted": True, "revoked_at": record.revoked_at})

    async def _found(self, request: Request) -> tuple[KeyRecord, StoredKey]:
        key_id = request.path_params["key_id"]
        stored = await self._ledger.ask(self._ledger.books.key, key_id) if ID.fullmatch(key_id) else None
        if stored is None:
            raise NotFoundError("No key of this id was issued.", code="key_not_found")
        return RECORD.decode(stored.record), stored

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        self._access.check(request)
        with self._bodies.open(request.scope, ADMIN) as opened:
            raw = await opened.read(request.receive, request.scope["headers"], MOST_ADMIN_BYTES)
        return mended(decode_body, raw or b"{}", msgspec.json.Decoder(kind))[0]


def _shown(record: KeyRecord, stored: StoredKey | None = None) -> dict[str, Any]:
    """A key as operators see it."""
    is_over = record.expires_at is not None and record.expires_at <= time.time()
    return {
        "object": "key",
        "id": record.id,
        "tenant": record.tenant,
        "name": record.name,
        "starts_with": record.shown,
        "status": "revoked" if record.revoked_at else "expired" if is_over else "active",
        "created_at": record.created_at,
        "created_by": record.created_by,
        "expires_at": record.expires_at,
        "revoked_at": record.revoked_at,
        "last_used_at": stored.used_min * 60 or None if stored else None,
        "models": list(record.models) or None,
        "calls_per_s": record.calls_per_s,
        "tokens_per_s": record.tokens_per_s,
        "budget": record.budget and {k: v for k, v in msgspec.structs.asdict(record.budget).items() if v is not None},
    }


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
