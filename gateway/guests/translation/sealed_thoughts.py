"""Thoughts that clients keep between two calls, sealed.

A model that thinks between its calls has to see these thoughts again. Clients send a thought back only if it came in an
opaque form that its API's vendor would have made, so the gateway makes one, and reads it in later requests.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import suppress
from functools import cached_property
from hashlib import sha512
from hmac import digest
from typing import TYPE_CHECKING, Any, Final

from plait.backends.translation.fields import Json

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

MARK: Final = "plait1."
"""The beginning of each seal. A body without it has no sealed thought."""

_GIVEN: Final = ("input", "messages")
"""The fields with the conversation: items of a response, or messages."""


class SealedThoughts:
    """Seals by AES-SIV (RFC 5297), with a key made of the `secret`. The same thought always has the same seal.

    Another tenant's seal, a vendor's, or one that was changed, is no seal here: it stays, and engines get none of it.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = digest(secret, b"plait-thoughts", sha512)

    def seal(self, tenant: str, thought: str) -> str:
        sealed = self._cipher.encrypt(thought.encode("utf-8", "replace"), [tenant.encode()])
        return MARK + urlsafe_b64encode(sealed).decode()

    def opened(self, tenant: str, fields: Json) -> Json:
        """The fields of a response or a message, with the tenant's own sealed thoughts as texts.

        A thought whose text is there stays as it is.
        """
        return {
            name: [self._opened(tenant, one) for one in value] if name in _GIVEN and isinstance(value, list) else value
            for name, value in fields.items()
        }

    def _opened(self, tenant: str, one: Any) -> Any:
        """An item, or a message with its blocks."""
        blocks = one.get("content") if isinstance(one, dict) and "role" in one else None
        if isinstance(blocks, list):
            return {**one, "content": [self._block(tenant, block) for block in blocks]}
        return self._block(tenant, one)

    def _block(self, tenant: str, block: Any) -> Any:
        match block:
            case {"type": "reasoning", "encrypted_content": sealed} if not block.get("content"):
                thought = self._thought(tenant, sealed)
                text = {"type": "reasoning_text", "text": thought}
                return block if thought is None else {**block, "encrypted_content": None, "content": [text]}
            case {"type": "thinking", "signature": sealed} | {"type": "redacted_thinking", "data": sealed} if (
                not block.get("thinking")
            ):
                thought = self._thought(tenant, sealed)
                return block if thought is None else {"type": "thinking", "thinking": thought, "signature": ""}
        return block

    def _thought(self, tenant: str, sealed: Any) -> str | None:
        """The text of the tenant's own seal; None for anything else."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as for the cipher

        if not isinstance(sealed, str) or not sealed.startswith(MARK):
            return None
        with suppress(InvalidTag, ValueError):
            return self._cipher.decrypt(urlsafe_b64decode(sealed.removeprefix(MARK)), [tenant.encode()]).decode()
        return None

    @cached_property
    def _cipher(self) -> AESSIV:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # noqa: PLC0415 - 9 MB, for models that think

        return AESSIV(self._key)
