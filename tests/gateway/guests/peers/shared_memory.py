"""A log that several gateways share, in memory: what `PostgresKeeper` does, without a database."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plait.gateway.admission.rate_leases import Drawn
from plait.gateway.admission.shares import Need, fair_parts
from plait.gateway.guests.store.event_log import (
    Claims,
    LeaseLostError,
    Member,
    RefusedDataError,
    SignRow,
    StoreError,
    drawn,
)
from plait.gateway.streams import Change, StoredStream, StreamKey


@dataclass
class SharedMemory:
    """What all gateways see. While it is `away` nobody can ask it."""

    owners: dict[StreamKey, int | None] = field(default_factory=dict)
    events: dict[StreamKey, list[Change]] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    buckets: dict[str, list[float]] = field(default_factory=dict)
    needs: dict[int, Mapping[str, Need]] = field(default_factory=dict)
    epochs: int = 0
    away: bool = False
    asked: list[StreamKey] = field(default_factory=list)
    """All streams that a gateway has named."""
    refused: Collection[str] = ()
    """Names that it does not take."""

    def give_up(self, epoch: int) -> None:
        """A gateway has died."""
        self.members.pop(epoch, None)
        self.needs.pop(epoch, None)
        self.owners = {key: None if owner == epoch else owner for key, owner in self.owners.items()}

    def stale(self, epoch: int) -> None:
        """Its lease is over, and nobody has noticed."""
        self.members[epoch] = self.members[epoch]._replace(is_stale=True)


class MemoryKeeper:
    """One gateway's `SharedKeeper`."""

    def __init__(self, shared: SharedMemory, url: str, sign: SignRow) -> None:
        self.epoch = 0
        self.claims = 0
        self._shared = shared
        self._url = url
        self._sign = sign

    def check(self) -> None:
        pass

    def open(self) -> int:
        self._check_away()
        self._shared.epochs += 1
        self.epoch = self._shared.epochs
        signature = self._sign(self.epoch, self._url, "1")
        self._shared.members[self.epoch] = Member(self.epoch, self._url, "1", is_stale=False, signature=signature)
        return self.epoch

    def read(self) -> Iterator[StoredStream]:
        return iter(self.take_over())

    def write(self, changes: Sequence[Change], *, again: bool = False) -> None:  # noqa: ARG002 - a failure writes nothing
        self._check()
        for change in changes:
            self._shared.asked.append(change.stream)
            if self._shared.owners.setdefault(change.stream, self.epoch) != self.epoch:
                continue
            if change.data is None:
                self._shared.events.pop(change.stream, None)
                del self._shared.owners[change.stream]
            else:
                self._shared.events.setdefault(change.stream, []).append(change)

    def renew(self) -> list[Member]:
        self._check()
        return list(self._shared.members.values())

    def claim(self, streams: Sequence[StreamKey], *, instead: str, begin: bool = True) -> Claims:
        self._check()
        self.claims += 1
        self._shared.asked += streams
        if any(key.name in self._shared.refused for key in streams):
            raise RefusedDataError("no value of its type")
        keys = {key: key._replace(kind=instead) for key in streams}
        keys = {key: other if other in self._shared.owners else key for key, other in keys.items()}
        adopted = [key for key in keys.values() if key in self._shared.owners and self._shared.owners[key] is None]
        for key in keys.values():
            if self._shared.owners.get(key) is None and (begin or key in self._shared.owners):
                self._shared.owners[key] = self.epoch
        owners = {key: self._shared.owners[there] or 0 for key, there in keys.items() if there in self._shared.owners}
        return Claims(owners, self._streams(adopted))

    def owner(self, stream: StreamKey) -> int | None:
        self._check()
        self._shared.asked.append(stream)
        return (self._shared.owners[stream] or 0) if stream in self._shared.owners else None

    def take_over(self) -> list[StoredStream]:
        self._check()
        taken = [key for key, owner in self._shared.owners.items() if owner is None]
        self._shared.owners.update(dict.fromkeys(taken, self.epoch))
        return self._streams(taken)

    def release(self, streams: Sequence[StreamKey]) -> None:
        self._check()
        for key in streams:
            if self._shared.owners.get(key) == self.epoch:
                self._shared.owners[key] = None

    def draw(
        self, bucket: str, rates: Sequence[float], least: Sequence[float], most: Sequence[float], *, burst_s: float
    ) -> Drawn:
        self._check_away()
        result = drawn(self._shared.buckets.get(bucket, [0.0] * len(rates)), rates, least, most, burst_s=burst_s)
        self._shared.buckets[bucket] = list(result.used)
        return result

    def share(self, needs: Mapping[str, Need]) -> Mapping[str, int]:
        self._check()
        self._shared.needs[self.epoch] = needs
        return {name: self._part(name, need.whole) for name, need in needs.items()}

    def stream(self, key: StreamKey) -> StoredStream:
        return self._streams([key])[0]

    def tidy(self) -> None:
        pass

    def close(self) -> None:
        self._shared.give_up(self.epoch)

    def _streams(self, keys: Sequence[StreamKey]) -> list[StoredStream]:
        return [StoredStream(key, self._shared.events.get(key, [])) for key in keys]

    def _part(self, name: str, whole: int) -> int:
        wanted = {epoch: each[name].wanted for epoch, each in sorted(self._shared.needs.items()) if name in each}
        return dict(zip(wanted, fair_parts(whole, list(wanted.values())), strict=True))[self.epoch]

    def _check_away(self) -> None:
        if self._shared.away:
            raise StoreError("away")

    def _check(self) -> None:
        self._check_away()
        if self.epoch not in self._shared.members:
            raise LeaseLostError("given up")
