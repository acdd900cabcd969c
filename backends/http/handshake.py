"""What is wrong with a TLS handshake, in words that an operator can act on.

OpenSSL only names the check that failed. If it was the name, a second handshake shows which names the certificate has.
`speaks_tls` tries a handshake with a port that was taken for plain HTTP. No request is sent on either connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, Final

from plait.backends.http.trust import Trust, TrustError

OTHER_NAME: Final = frozenset((62, 64))
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH. These numbers are those of OpenSSL's x509_vfy.h."""

SELF_SIGNED: Final = 18
UNKNOWN_ISSUER: Final = frozenset((2, 7, 19, 20, 21))
"""7 is X509_V_ERR_CERT_SIGNATURE_FAILURE: an issuer with the name of a trusted one and another key."""

_WORDS: Final[Mapping[int, str]] = {
    9: "has a certificate that is not yet valid: compare the clocks",
    10: "has a certificate that has expired",
    SELF_SIGNED: "has a self-signed certificate that is not trusted",
    **dict.fromkeys(UNKNOWN_ISSUER, "has a certificate of an unknown issuer"),
}

NO_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNKNOWN_PROTOCOL"))
"""OpenSSL's reasons for an answer without TLS. Text such as `HTTP/1.1 400` looks like a record of an odd version."""


async def handshake_problem(error: OSError, address: str, port: int, name: str, trust: Trust) -> str:
    """Why a handshake with the engine at an address failed. `name` is the host name that its certificate must have."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return await _certificate_problem(error, address, port, name, trust)
    if isinstance(error, ssl.SSLError) and error.reason in NO_TLS:
        return "answers without TLS, as a plain HTTP server does: its url should begin with http://"
    if isinstance(error, ssl.SSLError):
        return f"failed the TLS handshake: {error.reason or error}"
    return "closed the connection in the TLS handshake: if it is a plain HTTP server, its url should begin with http://"


async def _certificate_problem(
    error: ssl.SSLCertVerificationError, address: str, port: int, name: str, trust: Trust
) -> str:
    code = error.verify_code
    if code in OTHER_NAME:
        names = await _certified_names(address, port, name, trust)
        return f"has a certificate for another name: for {names}, not for {name}"
    problem = _WORDS.get(code, f"has a certificate that is not valid: {error.verify_message}")
    if code == SELF_SIGNED or code in UNKNOWN_ISSUER:
        problem += f": trusted are those of {trust.source}"
    return f"{problem}; new ones were not taken over: {trust.problem}" if trust.problem else problem


async def _certified_names(address: str, port: int, name: str, trust: Trust) -> str:
    """The names in the engine's certificate, as text for an error message."""
    try:
        certificate = await _look(address, port, name, trust.any_name)
    except (OSError, TrustError):  # the engine or the trusted files have changed since the first handshake
        return "names that could not be read"
    return ", ".join(value for _, value in certificate.get("subjectAltName", ())) or "no name"


async def speaks_tls(host: str, port: int, within_s: float) -> bool:
    """Whether an engine completes a TLS handshake within `within_s` seconds. Its certificate is not checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(within_s):
            await _look(host, port, host, context)
    except OSError:
        return False
    return True


async def _look(address: str, port: int, name: str, context: ssl.SSLContext) -> Mapping[str, Any]:
    """The certificate that a handshake shows, as `ssl.SSLSocket.getpeercert` has it. Raises OSError."""
    connect = asyncio.get_running_loop().create_connection
    transport, _ = await connect(asyncio.Protocol, address, port, ssl=context, server_hostname=name)
    certificate: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    transport.abort()
    return certificate
