"""The interface of an event log: streams, changes, and the `Keeper` that stores them.

A log has streams of events, such as one for each session; an event is opaque bytes. A gateway writes under a lease with
an epoch, which grows with each holder, so that the writes of an earlier holder are refused (fencing). `SqliteKeeper`
has one log in a file, for one gateway. A `SharedKeeper` has a log for several gateways: each gateway has a lease of its
own, and each stream has one gateway as its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from plait.gateway.admission.rate_leases import Drawn
from plait.gateway.admission.shares import Need
from plait.gateway.streams import Change, StoredStream, StreamKey

LOST: Final = "lost"
"""The kind of a stream whose key is lost."""

UNREADABLE: Final = "unreadable"
"""The prefix of the kind of a stream that was set aside."""


def set_aside(stream: StoredStream) -> list[Change]:
    """The changes that move a damaged stream to another kind, which only operators read."""
    aside = stream.key._replace(kind=f"{UNREADABLE} {stream.key.kind}")
    kept = [change._replace(stream=aside) for change in stream.events]
    return [Change(aside, 0.0, None), *kept, Change(stream.key, 0.0, None)]


class StoreError(Exception):
    """The log could not be written or read. A later attempt may succeed."""


class RefusedDataError(StoreError):
    """The database refuses this data, now and later. Other data can be written."""


class HeldElsewhereError(StoreError):
    """Another process has the lease. It may release it."""


class LeaseLostError(StoreError):
    """Another process has taken the log over: this one must not write to it any more."""


class CorruptStoreError(StoreError):
    """The stored data is malformed."""


class StoreVersionError(ValueError):
    """A later version of Plait has written the log, so this one must not touch it."""


class Keeper(Protocol):
    """Stores a log. Synchronous; one thread calls all methods but `check`."""

    def check(self) -> None:
        """Raise ValueError, with what to do, if a log can never be stored here. Takes no lease and changes nothing."""

    def open(self) -> int:
        """Take the lease, and return its epoch. Raises `HeldElsewhereError`, `StoreError` or `StoreVersionError`."""

    def read(self) -> Iterator[StoredStream]:
        """All streams, the oldest first, also damaged ones. Raises `StoreError`."""

    def stream(self, key: StreamKey) -> StoredStream:
        """One stream that this process has read or written; without events if there is none. Raises as `read` does."""

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:
        """Write the changes in order, all or none. Raises `LeaseLostError`, `RefusedDataError` or `StoreError`.

        After a plain `StoreError` the commit may have happened or not. The caller then repeats the same changes with
        `again`, which writes them once in either case.
        """

    def tidy(self) -> None:
        """Remove the remains of deleted streams. Called when nothing is written for a while."""

    def close(self) -> None:
        """Release the lease."""


LEASE_S: Final = 5
"""The duration of a lease. It is renewed each second, so four renewals may fail before the others take over."""


class Member(NamedTuple):
    """A gateway's row in a shared store. `is_stale`: its lease is over, but nobody has taken its streams yet.

    The `signature` shows that a gateway wrote the row, and not just somebody with access to the table. It is empty in
    rows of an earlier release.
    """

    epoch: int
    url: str
    release: str
    is_stale: bool
    signature: str


SignRow = Callable[[int, str, str], str]
"""Makes the signature of a gateway's row from its epoch, its address and its release."""


class Claims(NamedTuple):
    """The result of a claim."""

    owners: Mapping[StreamKey, int]
    """The epoch of each stream's owner. A stream that does not exist is missing."""
    adopted: Sequence[StoredStream]
    """Streams whose owner had died. This gateway owns them now."""


def drawn(
    used: Sequence[float], rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
) -> Drawn:
    """Draw from a leaky bucket whose size is `burst_s` seconds of its `rates`.

    Grants up to `most` of each amount, but nothing at all unless it can grant `least` of each. An amount larger than
    the bucket is granted if the bucket is empty, or it never would be. Negative amounts are returned to the bucket.
    """
    wholes = [burst_s * rate for rate in rates]
    rooms = [
        max(whole, want) - now if now <= 0 else whole - now
        for now, whole, want in zip(used, wholes, least, strict=True)
    ]
    if any(want > max(room, 0.0) for want, room in zip(least, rooms, strict=True)):
        return Drawn([0.0] * len(used), used)
    granted = [min(want, max(room, 0.0)) for want, room in zip(most, rooms, strict=True)]
    return Drawn(granted, [max(0.0, now + got) for now, got in zip(used, granted, strict=True)])


class SharedKeeper(Keeper, Protocol):
    """Stores a log for several gateways. `write` skips streams of other owners; `read` takes over ownerless streams."""

    @property
    def epoch(self) -> int:
        """The epoch of this gateway's lease; 0 before the first."""

    def renew(self) -> list[Member]:
        """Renew the lease, and return all gateways. Those whose leases are over lose their streams.

        Raises `LeaseLostError` or `StoreError`, as all methods below.
        """

    def claim(self, streams: Sequence[StreamKey], *, instead: str, begin: bool = True) -> Claims:
        """Become the owner of streams without one; with `begin`, create those that do not exist.

        All are of one kind. A stream of the kind `instead` with the same tenant and name counts as the stream itself.
        """

    def owner(self, stream: StreamKey) -> int | None:
        """The epoch of a stream's owner; 0 if it has none; None if the stream does not exist."""

    def take_over(self) -> list[StoredStream]:
        """Become the owner of some streams without one; empty if none are left."""

    def release(self, streams: Sequence[StreamKey]) -> None:
        """Give up the ownership of these, so that another gateway can take them over."""

    def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn:
        """Draw from a leaky bucket that all gateways share (see `drawn`)."""

    def share(self, needs: Mapping[str, Need]) -> Mapping[str, int]:
        """Set what this gateway wants of each shared limit. Returns what it may use of each until its next call.

        The sum over all gateways never exceeds the total: a part grows only after another gateway has called again and
        given some up.
        """
