"""What a log of events is: its streams, the changes that are written to it, and what its keeper has to do.

A log holds streams of events, such as one of each session. It knows events as bytes. A gateway that keeps a log holds
its lease: an owner's name with an epoch, which grows with each holder, so that what an earlier holder still tries to
write is refused. `SqliteKeeper` keeps a log in a file of its own. Several gateways share the log of a `SharedKeeper`:
each has a lease, and each stream has one of them as its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol


class StreamKey(NamedTuple):
    """A stream: a `kind` of things, a tenant's identity, and the thing's name. Unique in the log."""

    kind: str
    tenant: str
    name: str


class Change(NamedTuple):
    """One event of a stream. Without `data` the stream ends: all of its events are deleted.

    `at_unix_s` is when it happened, and `version` says how `data` is to be read.
    """

    stream: StreamKey
    at_unix_s: float
    data: bytes | None
    version: int = 1


class StoredStream(NamedTuple):
    """A stream as it is read: its events in the order in which they were written.

    A stream with a `problem` is not what was written, and may lack events.
    """

    key: StreamKey
    events: Sequence[Change]
    problem: str | None = None


LOST: Final = "lost"
"""The kind of a stream whose own kind, tenant and name are gone."""

UNREADABLE: Final = "unreadable"
"""Begins the kind of a stream that was set aside."""


def set_aside(stream: StoredStream) -> list[Change]:
    """The changes that keep a stream under another kind, where only an operator looks for it."""
    aside = stream.key._replace(kind=f"{UNREADABLE} {stream.key.kind}")
    kept = [change._replace(stream=aside) for change in stream.events]
    return [Change(aside, 0.0, None), *kept, Change(stream.key, 0.0, None)]


class StoreError(Exception):
    """The log could not be written or read. It may work later."""


class RefusedDataError(StoreError):
    """The log refuses the data themselves: the same would be refused again, and others would not."""


class HeldElsewhereError(StoreError):
    """Another process holds the log. It may give it up."""


class LeaseLostError(StoreError):
    """Another process has taken the log over: this one must not write to it any more."""


class CorruptStoreError(StoreError):
    """What was stored is malformed."""


class StoreVersionError(ValueError):
    """A later version of Plait has written the log, so this one must not touch it."""


class Keeper(Protocol):
    """Keeps a log. Synchronous; all but `check` are called by one thread."""

    def check(self) -> None:
        """Raise ValueError if the log can never be kept here, with what to do. Takes no lease, and changes nothing."""

    def open(self) -> int:
        """Take the lease, and return its epoch. Raises `HeldElsewhereError`, `StoreError` or `StoreVersionError`."""

    def read(self) -> Iterator[StoredStream]:
        """All streams, in the order in which they were begun, also those with a problem. Raises `StoreError`."""

    def stream(self, key: StreamKey) -> StoredStream:
        """One of the streams that were read or written, without events if there is none. Raises as `read` does."""

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:
        """Write all of these, in this order, or none. Raises `LeaseLostError`, `RefusedDataError` or `StoreError`.

        After a `StoreError` nobody knows which. `again` says that these are the changes of the last, failed `write`:
        they are not written twice.
        """

    def tidy(self) -> None:
        """Nothing was written for a while: take away what deleted streams have left."""

    def close(self) -> None:
        """Give the lease up."""


LEASE_S: Final = 5
"""One of several gateways that says nothing for so long has died. It renews its lease each second, so four attempts may
fail.
"""


class Member(NamedTuple):
    """A row of the gateways that share a log. `is_stale`: its lease is over, though nobody has taken its streams yet.

    Whoever can write the table can write rows, so each has a `signature`. It is empty in those of an earlier release.
    """

    epoch: int
    url: str
    release: str
    is_stale: bool
    signature: str


SignRow = Callable[[int, str, str], str]
"""Makes the signature of a gateway's row from its epoch, its address and its release."""


class Claims(NamedTuple):
    """What was found of claimed streams: the epoch of each one's owner, and those that had lost their owner.

    The latter are this gateway's from now on, with their events. A stream that is not there has no owner.
    """

    owners: Mapping[StreamKey, int]
    adopted: Sequence[StoredStream]


class Drawn(NamedTuple):
    """What was `granted` of each amount in a bucket, and what is `used` of it now."""

    granted: Sequence[float]
    used: Sequence[float]


def drawn(
    used: Sequence[float], rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
) -> Drawn:
    """What may be had of a bucket that holds `burst_s` of its rates: all that is wanted at least, or nothing.

    More than it ever holds may be had once, when nothing is used. Negative amounts are given back.
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


class Need(NamedTuple):
    """Of something that gateways share: how much there is of it for all of them, and how much one wants."""

    whole: int
    wanted: int


def fair_parts(whole: int, wanted: Sequence[int]) -> list[int]:
    """What each of those that want something gets of a whole: no more than it wants while another wants more.

    If something is left, all get as much of it. The parts are the whole (max-min fairness).
    """
    parts, rest, count = [0] * len(wanted), whole, len(wanted)
    for served, number in enumerate(sorted(range(count), key=wanted.__getitem__)):
        parts[number] = min(wanted[number], rest // (count - served))
        rest -= parts[number]
    more, first = divmod(rest, count)
    return [part + more + (number < first) for number, part in enumerate(parts)]


class SharedKeeper(Keeper, Protocol):
    """Keeps a log for several gateways. `write` changes no stream of another one, and `read` takes what nobody owns."""

    @property
    def epoch(self) -> int:
        """That of this gateway's lease; 0 before the first."""

    def renew(self) -> list[Member]:
        """Hold the lease for longer; returns all gateways. Those that have died lose their streams.

        Raises `LeaseLostError` or `StoreError`, as all methods below.
        """

    def claim(self, streams: Sequence[StreamKey], *, instead: str, begin: bool = True) -> Claims:
        """Become the owner of streams that have none; `begin` those that are not there.

        All are of one kind. A stream of the kind `instead` with the same tenant and name stands for a claimed one.
        """

    def owner(self, stream: StreamKey) -> int | None:
        """The epoch of a stream's owner, 0 if it has lost it; None if there is no such stream."""

    def take_over(self) -> list[StoredStream]:
        """Become the owner of some streams that have lost theirs; empty if there are none left."""

    def release(self, streams: Sequence[StreamKey]) -> None:
        """Let others have these."""

    def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn:
        """Take from a bucket that all gateways share, and that empties at `rates`. See `drawn`."""

    def share(self, needs: Mapping[str, Need]) -> Mapping[str, int]:
        """Tell what this gateway wants of what all share, by name; returns what it may use of each until it asks again.

        What gateways may use is never more than the whole: one has more only once another has asked again for less.
        """
