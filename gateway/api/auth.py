"""API keys, as the SDKs send them: as bearer tokens (OpenAI), in `x-api-key` (Anthropic) or in `api-key` (Azure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from time import time
from typing import Final, NamedTuple

from starlette.requests import Request
from starlette.types import Scope

from plait.backends.errors import AccountsUnavailableError, AuthenticationError, NotFoundError, PlaitError
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.asgi import ON_KNOWN, presented_keys
from plait.gateway.config.sections import TenantConfig
from plait.gateway.others import API_KEYS, CHECKED, Checked

KEY: Final = "plait.key"
"""The key in a scope for the id of the request's API key. Absent for a request that needs none."""

KEY_ID_DIGITS: Final = 8


def key_of(scope: Scope) -> str:
    """The id of a checked request's key; empty: it needs none."""
    found: str = scope.get(KEY, "")
    return found


class IssuedKey(NamedTuple):
    """An API key that a guest has issued: the identity of its tenant, its id, and when it ends, in seconds from 1970.

    A key that was revoked has ended.
    """

    tenant: str
    key_id: str
    ends_s: float
    is_revoked: bool = False


class IssuedKeys(dict[bytes, IssuedKey]):
    """The issued keys by the SHA-256 of each, as they were known when their store last answered.

    They open the gateway until `known_until_s`, in seconds from 1970. While the store `is_away`, a key of their form
    (`BEGINS`, `LENGTH`) that is not among them may have been issued elsewhere.
    """

    BEGINS: Final = b"sk-"
    LENGTH: Final = 46

    known_until_s: float = 0.0
    is_away: bool = True


class KeyRing:
    """The API keys of one setting, each with its tenant. A ring without keys is open: every request may pass.

    Each of `keys` is a tenant of its own. A tenant of `tenants` may have several keys, and those that are `issued`. A
    request that another gateway has forwarded has no key: that gateway has checked the key by its ring of the same
    `name`.

    A key is looked up by its SHA-256, so the time taken reveals nothing about the keys, and does not depend on their
    number.
    """

    issued: IssuedKeys | None = None

    def __init__(
        self,
        keys: Iterable[str],
        tenants: Iterable[TenantConfig] = (),
        ids: TenantIds | None = None,
        name: str = API_KEYS,
    ) -> None:
        self._name = name
        self._ids = ids or TenantIds()
        self.replace(keys, tenants)

    def replace(self, keys: Iterable[str], tenants: Iterable[TenantConfig] = ()) -> None:
        """Have these keys in place of those before."""
        given = [(key, self._ids.of_key(key)) for key in keys]
        named = [(tenant, self._ids.of_name(tenant.name)) for tenant in tenants]
        given += [(key, identity) for tenant, identity in named for key in tenant.api_keys]
        self._keys = {
            sha256(key.encode()).digest(): (identity, self._ids.of_key(key)[:KEY_ID_DIGITS]) for key, identity in given
        }
        self.is_open = not given and not named

    def has(self, key_digest: bytes) -> bool:
        """Whether a key of this SHA-256 is in the configuration."""
        return key_digest in self._keys

    def ended(self) -> set[str]:
        """The ids of the issued keys that were revoked or have expired."""
        return {key.key_id for key in (self.issued or {}).values() if key.ends_s <= time()}

    def check(self, scope: Scope) -> str:
        """The identity of the tenant that has the request's first valid key; empty if the ring is open.

        The scope then has the key's id as `KEY`. Raises `AuthenticationError` for a request without a valid key, and
        `AccountsUnavailableError` while it cannot be known whether its key is valid.
        """
        checked: Checked | None = scope.get(CHECKED)
        if checked is not None and checked.ring == self._name:
            tenant, scope[KEY] = checked.tenant, checked.key
        elif self.is_open:
            return ""
        else:
            presented = presented_keys(scope["headers"])
            for given in presented:
                digest = sha256(given).digest()
                found = self._keys.get(digest)
                if found is not None:
                    tenant, scope[KEY] = found
                    break
                if self.issued is not None and digest in self.issued:
                    tenant, scope[KEY], ends_s, _ = self.issued[digest]
                    if time() < ends_s and time() < self.issued.known_until_s:
                        break
            else:
                raise self._refusal(presented)
        if ON_KNOWN in scope:
            scope[ON_KNOWN]()
        return tenant

    def _refusal(self, presented: Sequence[bytes]) -> PlaitError:
        """The error of a request without a valid key: what is known of the first issued one, if it has one."""
        issued = IssuedKeys() if self.issued is None else self.issued
        rows = [issued[digest] for digest in (sha256(given).digest() for given in presented) if digest in issued]
        if rows and rows[0].is_revoked:
            return AuthenticationError("This API key was revoked.", code="key_revoked")
        if rows and time() >= rows[0].ends_s:
            return AuthenticationError("This API key has expired.", code="key_expired")
        has_form = any(given.startswith(issued.BEGINS) and len(given) == issued.LENGTH for given in presented)
        if rows or (self.issued is not None and self.issued.is_away and has_form):
            return AccountsUnavailableError()
        return AuthenticationError("Incorrect or missing API key: send 'Authorization: Bearer <key>'.")


ONLY_WITH_A_KEY = "The admin API is offered with server.admin_key alone, on server.admin_port if that is set."
"""The same whether there is no key or another port, so that strangers learn nothing."""


class AdminAccess:
    """Access to the admin API: a request needs one of `keys`. If `port` is set, only the listener on it offers the API.

    Without `keys`, no listener offers the API.
    """

    def __init__(self, keys: KeyRing, port: int | None) -> None:
        self.keys = keys
        self._port = port

    def is_offered(self, request: Request) -> bool:
        _, port = request.scope.get("server") or ("", None)
        return not self.keys.is_open and self._port in (None, port)

    def offered(self, request: Request) -> None:
        """Raise `NotFoundError` unless the request's listener offers the admin API."""
        if not self.is_offered(request):
            said = f"Unknown path: {request.method} {request.url.path}. {ONLY_WITH_A_KEY}"
            raise NotFoundError(said)

    def check(self, request: Request) -> None:
        """Raise `NotFoundError` as `offered` does, and `AuthenticationError` without a valid key."""
        self.offered(request)
        self.keys.check(request.scope)
