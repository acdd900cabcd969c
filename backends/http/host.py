"""Connects to the first of a host's addresses that answers, after RFC 8305 (Happy Eyeballs).

If an address does not answer within a quarter of a second, the next one is tried too, and the first connection wins.
uvloop tries an address only after the one before has failed, so an address that drops packets would use up the timeout.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_address
from itertools import chain, islice, zip_longest
from typing import Any, Protocol, TypeVar

STAGGER_S = 0.25
"""When the next address is tried: RFC 8305's Connection Attempt Delay."""

LATE_S = 60.0
"""How long an address that did not answer within `STAGGER_S` comes after the others."""


class AddressError(OSError):
    """An address cannot be connected to. The text says what the address did, as in "refused the connection"."""


class UnreachableHostError(OSError):
    """No address of a host can be connected to. The text says what each address did.

    `timed_out` says that the time was up before all addresses had failed.
    """

    def __init__(self, text: str, *, timed_out: bool) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class Closable(Protocol):
    def close(self) -> None:
        """Close it at once."""


OpenT = TypeVar("OpenT", bound=Closable)

Attempt = Callable[[str], Coroutine[Any, Any, OpenT]]
"""Opens a connection to an address. Raises `AddressError`."""


class Host:
    """A host, whose `name` may be an address, and a port."""

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port
        self._literal = (name,) if _is_address(name) else None
        self._late_until_s: dict[str, float] = {}

    async def connect(self, attempt: Attempt[OpenT], within_s: float) -> OpenT:
        """The first connection to one of the addresses. Raises `UnreachableHostError`."""
        ends_s = asyncio.get_running_loop().time() + within_s
        did: dict[str, str] = {}
        try:
            async with asyncio.timeout_at(ends_s):
                found = self._literal or await self._addresses()
                if len(found) == 1:
                    connection = await _try(found[0], attempt, did, ends_s)
                else:
                    connection = await self._race(found, attempt, did, ends_s)
        except TimeoutError:
            text = self._said(did) or f"the name {self._name} was not resolved within {within_s:g} s"
            raise UnreachableHostError(text, timed_out=True) from None
        if connection is None:
            raise UnreachableHostError(self._said(did), timed_out=False)
        return connection

    async def _addresses(self) -> Sequence[str]:
        """The addresses, in the order of attempts. Raises `UnreachableHostError` if there are none."""
        try:
            found = await addresses(self._name, self._port)
        except (OSError, UnicodeError) as error:  # UnicodeError for a malformed name
            reason = isinstance(error, OSError) and error.strerror
            text = f"the name {self._name} was not resolved: {reason or error}"
            raise UnreachableHostError(text, timed_out=False) from error
        now_s = asyncio.get_running_loop().time()
        late = {address: until_s for address in found if (until_s := self._late_until_s.get(address, 0.0)) > now_s}
        self._late_until_s = late
        return sorted(_alternating(found), key=late.__contains__)

    async def _race(
        self, addresses: Sequence[str], attempt: Attempt[OpenT], did: dict[str, str], ends_s: float
    ) -> OpenT | None:
        """The first connection of several attempts; None if all fail. `did` gets what each address did.

        An attempt begins once the one before has failed, or has not answered within `STAGGER_S`.
        """
        loop, untried = asyncio.get_running_loop(), iter(addresses)
        running: dict[asyncio.Task[OpenT | None], str] = {}
        try:
            while True:
                for address in islice(untried, 1):
                    running[asyncio.create_task(_try(address, attempt, did, ends_s), name="connect")] = address
                if not running:
                    return None
                ended, _ = await asyncio.wait(running, timeout=STAGGER_S, return_when=asyncio.FIRST_COMPLETED)
                if not ended:
                    self._late_until_s |= dict.fromkeys(running.values(), loop.time() + LATE_S)
                for task in ended:
                    address, connection = running.pop(task), task.result()
                    if connection is not None:
                        self._late_until_s.pop(address, None)
                        return connection
        finally:
            for task in running:
                task.cancel()
                task.add_done_callback(_close)

    def _said(self, did: dict[str, str]) -> str:
        return "; ".join(
            f"{f'[{address}]' if is_ipv6(address) else address}:{self._port} {what}" for address, what in did.items()
        )


async def addresses(name: str, port: int) -> list[str]:
    """A host's addresses in the system's order of preference. Raises OSError, and UnicodeError for a malformed name."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def _try(address: str, attempt: Attempt[OpenT], did: dict[str, str], ends_s: float) -> OpenT | None:
    """A connection to an address; None if it fails. `did` gets what the address did."""
    did[address] = f"did not answer within {ends_s - asyncio.get_running_loop().time():.2g} s"
    try:
        return await attempt(address)
    except AddressError as error:
        did[address] = str(error)
        return None


def _close(attempt: asyncio.Task[OpenT | None]) -> None:
    """Close the connection of a losing attempt, which may have opened before its cancellation took effect."""
    if not attempt.cancelled() and attempt.exception() is None and (connection := attempt.result()) is not None:
        connection.close()


def _alternating(found: Sequence[str]) -> list[str]:
    """The addresses, IPv4 and IPv6 by turns, in the family order of the first one (RFC 8305, 4)."""
    first = [address for address in found if is_ipv6(address) is is_ipv6(found[0])]
    others = [address for address in found if address not in first]
    return [address for address in chain.from_iterable(zip_longest(first, others)) if address is not None]


def is_ipv6(address: str) -> bool:
    return ":" in address


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
