"""API keys, as the SDKs send them: as bearer tokens (OpenAI), in `x-api-key` (Anthropic) or in `api-key` (Azure)."""

from __future__ import annotations

from collections.abc import Iterable
from hmac import compare_digest

from starlette.requests import Request
from starlette.types import Scope

from plait.backends.errors import AuthenticationError, NotFoundError
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.asgi import ON_KNOWN, presented_keys
from plait.gateway.config.sections import TenantConfig
from plait.gateway.others import API_KEYS, CHECKED, Checked


class KeyRing:
    """The API keys of one setting, each with its tenant. A ring without keys is open: every request may pass.

    Each of `keys` is a tenant of its own. A tenant of `tenants` may have several keys. A request that another gateway
    has forwarded has no key: that gateway has checked the key by its ring of the same `name`.
    """

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
        self._keys = [(key.encode(), self._ids.of_key(key)) for key in keys]
        for tenant in tenants:
            identity = self._ids.of_name(tenant.name)
            self._keys += [(key.encode(), identity) for key in tenant.api_keys]

    @property
    def is_open(self) -> bool:
        """Whether the gateway accepts requests without a key."""
        return not self._keys

    def check(self, scope: Scope) -> str:
        """The identity of the tenant that has the request's first valid key; empty if the ring is open.

        Raises `AuthenticationError` for a request without a valid key.
        """
        checked: Checked | None = scope.get(CHECKED)
        if checked is not None and checked.ring == self._name:
            tenants = [checked.tenant]
        elif not self._keys:
            return ""
        else:  # every key is compared, so that the time taken reveals nothing about the keys
            presented = presented_keys(scope["headers"])
            tenants = [tenant for given in presented for key, tenant in self._keys if compare_digest(given, key)]
        if not tenants:
            raise AuthenticationError("Incorrect or missing API key: send 'Authorization: Bearer <key>'.")
        if ON_KNOWN in scope:
            scope[ON_KNOWN]()
        return tenants[0]


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
