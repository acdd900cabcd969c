"""Who may call: API keys as bearer tokens, as the OpenAI SDK sends them."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from plait.backends.errors import AuthenticationError
from plait.gateway.asgi import Headers, header

TENANT_DIGITS = 32
"""128 bits name a tenant without giving its key away."""


class KeyRing:
    """The keys of a gateway; without any, it is open."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return not self._keys

    def check(self, headers: Headers) -> str:
        """The tenant whose key was presented (its hash; empty for an open gateway); raises `AuthenticationError`."""
        if not self._keys:
            return ""
        scheme, _, token = (header(headers, b"authorization") or "").partition(" ")
        presented = token.strip().encode("latin-1")
        # Every key is compared, so that the time taken tells nothing about any of them.
        known = [compare_digest(presented, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise AuthenticationError("Incorrect or missing API key: send 'Authorization: Bearer <key>'.")
        return sha256(b"plait-tenant\0" + presented).hexdigest()[:TENANT_DIGITS]
