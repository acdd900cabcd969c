"""The signatures between gateways: HMACs (RFC 2104) with SHA-256 and a shared key, valid for `LIFE_S`.

- Of a row in the store: covers epoch, address, release and time. A copy is of no use for another address, nor for long
  after the gateway has ended.
- Of a forwarded request: covers the receiver, method, target, body, the tenant's identity, and the headers that change
  what the request does. The identity replaces the client's API key. So an attacker who can write the table of gateways,
  or reads the traffic between them, gets no API keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from hmac import compare_digest, digest
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from plait.backends.errors import PeerUnavailableError
from plait.gateway.asgi import KEY_HEADERS, NAME, Headers
from plait.gateway.intake.agents import SESSION_HEADERS
from plait.gateway.others import Checked, Forwarded

LIFE_S: Final = 60
"""The lifetime of a signature, and so the largest difference of two gateways' clocks. Rows are signed each second."""

PEER_HEADER: Final = b"plait-peer"
"""The header in which a gateway signs a request that it forwards."""

KEY_HEADER: Final = b"plait-key"
"""The header with the id of the client's API key, in a request that a gateway forwards. Earlier releases ignore it."""

_READ: Final = KEY_HEADERS | SESSION_HEADERS | {b"accept", b"content-encoding", b"content-type"}
"""Headers that are signed, beside annotations. Proxies between gateways may add others, such as `x-request-id`."""


class Said(NamedTuple):
    """The signed statements about a forwarded request. `port` is the one that the client connected to, or 0."""

    port: int
    checked: Checked
    body_sha256: str


class SignedForAnotherTimeError(PeerUnavailableError, code="clocks_differ"):
    """A gateway's signature is too old, or from the future."""

    def __init__(self, by_s: float) -> None:
        super().__init__(f"The clocks of gateways differ by {by_s:.0f} s.", retry_after_s=1.0)
        self.by_s = by_s


class PeerKey:
    """A secret that gateways share. Times are seconds by the wall clock."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def __repr__(self) -> str:
        return "PeerKey(...)"

    def sign_row(self, epoch: int, url: str, release: str, now_unix_s: float) -> str:
        """The time and the HMAC of a gateway's row."""
        at_unix_s = int(now_unix_s)
        return f"{at_unix_s} {self._mac('row', epoch, url, release, at_unix_s)}"

    def row_signed_s(self, signature: str, epoch: int, url: str, release: str) -> int | None:
        """The Unix time of a row's signature; None if it is missing or invalid."""
        at, _, mac = signature.partition(" ")
        if not _is_number(at):
            return None
        is_right = compare_digest(mac.encode(), self._mac("row", epoch, url, release, int(at)).encode())
        return int(at) if is_right else None

    def sign_request(self, request: Forwarded, to: str, now_unix_s: float) -> tuple[bytes, bytes]:
        """The header that signs a request `to` the gateway of that name."""
        path, _, query = request.target.partition("?")
        ring, tenant, _ = request.checked  # the key's id is in a header of its own
        said = [str(int(now_unix_s)), ring, tenant, str(request.port or 0), sha256(request.body).hexdigest()]
        mac = self._mac("request", to, request.method, unquote(path), query, _signed(request.headers), *said)
        return PEER_HEADER, " ".join((*said, mac)).encode()

    def read_request(self, header: bytes, scope: Mapping[str, Any], to: str, now_unix_s: float) -> Said | None:
        """Verify the header of a request to the gateway `to`. None: invalid. Raises `SignedForAnotherTimeError`."""
        *said, mac = header.decode("latin-1").split(" ")
        if len(said) != 5 or not (_is_number(said[0]) and _is_number(said[3])):
            return None
        query = scope.get("query_string", b"").decode("latin-1")
        signed = self._mac("request", to, scope["method"], scope["path"], query, _signed(scope["headers"]), *said)
        if not compare_digest(mac.encode("latin-1"), signed.encode()):
            return None
        at, ring, tenant, port, body_sha256 = said
        if abs(now_unix_s - int(at)) > LIFE_S:
            raise SignedForAnotherTimeError(now_unix_s - int(at))
        key = dict(scope["headers"]).get(KEY_HEADER, b"").decode("latin-1")
        return Said(int(port), Checked(ring, tenant, key), body_sha256)

    def answer(self, header: bytes) -> bytes:
        """The answer to a request with this header, which only a gateway with the same key can make."""
        return self._mac("answer", header.decode("latin-1")).encode()

    def _mac(self, *values: object) -> str:
        return digest(self._secret, msgspec.json.encode(values), "sha256").hex()


def _signed(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The signed headers, sorted by name. Headers of one name keep their order, because the first may count."""
    return sorted((item for item in headers if _is_read(item[0])), key=NAME)


def _is_read(name: bytes) -> bool:
    return name in _READ or (name.startswith((b"plait-", b"x-slo-", b"x-llm-d-slo-")) and name != PEER_HEADER)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20
