"""Who a tenant is: an identity inside, which nobody can guess, and a label for operators.

The identity is the tenant's cache salt in the engines, and owns its sessions. It is an HMAC, so that only who has the
server's secret can tell it from a key or a name. `/metrics` may be open, so it shows labels only.
"""

from __future__ import annotations

from hashlib import sha256
from hmac import digest
from secrets import token_bytes
from typing import Final

IDENTITY_DIGITS: Final = 32
"""Hexadecimal: 128 bits. All identities have the same length, so that none with a client's salt behind it is another's
with another salt."""

LABEL_DIGITS: Final = 8
"""Hexadecimal: of a thousand tenants, two have the same label with a chance of 1 in 8,000."""


class TenantIds:
    """Identities and labels, which stay the same as long as the `secret` does. Without one they last as long as this.

    An open gateway has one tenant, the empty string.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret or token_bytes(32)
        self._names: dict[str, str] = {}  # by identity, also of tenants that are gone: their calls may still run

    def of_key(self, key: str) -> str:
        """The tenant that has only this key."""
        return self._identity(b"key", key)

    def of_name(self, name: str) -> str:
        """The tenant of a `[[tenants]]` section."""
        tenant = self._identity(b"name", name)
        self._names[tenant] = name
        return tenant

    def label(self, tenant: str) -> str:
        """What logs and metrics call a tenant: its name, or the first digits of its identity."""
        return self._names.get(tenant) or tenant[:LABEL_DIGITS]

    def _identity(self, kind: bytes, value: str) -> str:
        message = b"plait-tenant\0%b\0%b" % (kind, value.encode())
        return digest(self._secret, message, sha256).hex()[:IDENTITY_DIGITS]
