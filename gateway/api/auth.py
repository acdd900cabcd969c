"""API keys, as the SDKs send them: as bearer tokens (OpenAI), in `x-api-key` (Anthropic) or in `api-key` (Azure)."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from plait.backends.errors import AuthenticationError
from plait.gateway.asgi import Headers, presented_key
from plait.gateway.config import TenantConfig

TENANT_DIGITS = 32
"""Hexadecimal digits of a tenant's name that is made from its key: 128 bits of a hash, which do not reveal the key."""


class KeyRing:
    """The API keys of a gateway: those of `tenants`, and `keys` of which each is a tenant. Without any it is open."""

    def __init__(self, keys: Iterable[str], tenants: Iterable[TenantConfig] = ()) -> None:
        self.replace(keys, tenants)

    def replace(self, keys: Iterable[str], tenants: Iterable[TenantConfig] = ()) -> None:
        """Accept these keys from now on, and no others."""
        self._keys = [(key.encode(), _name(key)) for key in keys]
        self._keys += [(key.encode(), tenant.name) for tenant in tenants for key in tenant.api_keys]

    @property
    def is_open(self) -> bool:
        """Whether the gateway accepts requests without a key."""
        return not self._keys

    def check(self, headers: Headers) -> str:
        """The tenant of the presented key: its name, or a hash of the key; empty for an open gateway.

        Raises `AuthenticationError`.
        """
        if not self._keys:
            return ""
        presented = presented_key(headers)
        # Every key is compared, so that the time taken reveals nothing about the keys.
        tenants = [tenant for key, tenant in self._keys if compare_digest(presented, key)]
        if not tenants:
            raise AuthenticationError("Incorrect or missing API key: send 'Authorization: Bearer <key>'.")
        return tenants[0]


def _name(key: str) -> str:
    """The tenant that has only this key."""
    return sha256(b"plait-tenant\0" + key.encode()).hexdigest()[:TENANT_DIGITS]
