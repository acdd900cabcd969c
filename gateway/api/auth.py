"""API keys as bearer tokens, as the OpenAI SDK sends them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from plait.backends.errors import AuthenticationError
from plait.gateway.asgi import Headers, header

TENANT_DIGITS = 32
"""Hexadecimal digits of a tenant's name: 128 bits of a hash, which do not reveal the key."""


class KeyRing:
    """The API keys of a gateway. A gateway without keys is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these keys from now on, and no others."""
        self._keys = [key.encode() for key in keys]

    @property
    def is_open(self) -> bool:
        """Whether the gateway accepts requests without a key."""
        return not self._keys

    def check(self, headers: Headers) -> str:
        """The tenant of the presented key, a hash of it; empty for an open gateway. Raises `AuthenticationError`."""
        if not self._keys:
            return ""
        scheme, _, token = (header(headers, b"authorization") or "").partition(" ")
        presented = token.strip().encode("latin-1")
        # Every key is compared, so that the time taken reveals nothing about the keys.
        known = [compare_digest(presented, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise AuthenticationError("Incorrect or missing API key: send 'Authorization: Bearer <key>'.")
        return sha256(b"plait-tenant\0" + presented).hexdigest()[:TENANT_DIGITS]
