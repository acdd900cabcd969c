"""What is written of a session, so that it can be made again: the events of the executor that nothing else implies.

A call that fails because an input has failed follows from other events, so it is not written. `replay` gives the events
to a new executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeVar

import msgspec

from plait.gateway.programs.held_call import HeldCall, KeptRequest
from plait.gateway.programs.session_errors import SKIPPED, FailureCause
from plait.policy.types import Objective


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The session begins."""

    ttl_s: float


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The session is still used, and lives for this time to live from now on."""

    ttl_s: float


class Preferred(msgspec.Struct, frozen=True, array_like=True, tag="preferred"):
    """The client states an objective for the session."""

    objective: Objective


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The session takes no more calls and values."""


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="submitted"):
    """A call has come. `inputs` are all variables that it waits for; `request` is what it can be made from again."""

    call_id: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fingerprint: bytes | None
    request: KeptRequest


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A call is given to engines once more, for its next output."""

    call_id: str


class ValueSet(msgspec.Struct, frozen=True, array_like=True, tag="value"):
    """A variable has its value, from a call or (None) from a client.

    `text` is what a transform made the value from, None without one. `answer` is the body of the call's answer to its
    client, None for a stream or without a client.
    """

    variable: str
    value: str
    call_id: str | None = None
    text: str | None = None
    was_cut: bool = False
    answer: bytes | None = None


class CallEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A call has failed by itself, was cancelled, or was skipped, which is "cancelled", too."""

    call_id: str
    what: FailureCause | str
    how: Literal["failed", "cancelled"]

    @property
    def is_skip(self) -> bool:
        return isinstance(self.what, FailureCause) and self.what.code == SKIPPED


class VariableFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A variable that no call was to produce has failed, for `where`."""

    variable: str
    where: str
    what: FailureCause


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A deleted session's id is refused until then."""

    until_unix_s: float


SessionEvent = (
    Opened | Kept | Preferred | Closed | Submitted | Started | ValueSet | CallEnded | VariableFailed | Refused
)

T = TypeVar("T")


class Unrecorded:
    """The record of a session that is in memory only: nothing is written, and nobody waits."""

    __slots__ = ()

    stores = False
    """Whether anything is written."""

    @property
    def is_durable(self) -> bool:
        """Whether what is told now will outlive the process, as far as that was promised."""
        return True

    async def told(self, news: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:  # noqa: ARG002
        """What a client may be told of the session, once all of it is stored; marked by `unstored` if it is not.

        Take the news first: what comes while this waits is not waited for. Raises `PlaitError` if nobody may be told,
        because another gateway may have the session. An answer that `is_begun` waits while the store cannot be reached.
        """
        return news

    async def settled(self) -> None:
        """Wait until all so far is stored, or cannot be: for what is told to nobody."""
        await self.told(None, lambda nothing: nothing, is_begun=True)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The events in the block are stored together or not at all."""
        yield

    def opened(self, ttl_s: float, now_s: float) -> None:
        """The session begins."""

    def touched(self, ttl_s: float, now_s: float) -> None:
        """Somebody uses the session."""

    def submitted(self, call: HeldCall, now_s: float) -> None:
        """A call has come."""

    def write(self, event: SessionEvent, now_s: float) -> None:
        """Another event has happened."""

    def deleted(self, until_s: float, now_s: float) -> None:
        """The session's id is refused until then."""

    def ended(self) -> None:
        """The session is over: nothing of it is kept."""


UNRECORDED = Unrecorded()


class Records(Protocol):
    """Says how sessions are recorded."""

    def check(self) -> None:
        """Raise `PlaitError` while sessions cannot be used, because those of an earlier gateway are being read."""

    def make(self, tenant: str, session_id: str) -> None:
        """Make the session from its record if it has one, and is not there yet."""

    def new(self, tenant: str, session_id: str, *, durable: bool) -> Unrecorded:
        """The record of a new session. Raises `PlaitError` if a durable one cannot be promised now."""

    def forgotten(self, tenant: str, session_id: str) -> None:
        """A deleted session's id is not refused any more."""


class InMemory:
    """Nothing is recorded."""

    def check(self) -> None:
        """Nothing has to be read."""

    def make(self, tenant: str, session_id: str) -> None:
        """There are no records."""

    def new(self, _tenant: str, _session_id: str, *, durable: bool) -> Unrecorded:  # noqa: ARG002 - a Records
        return UNRECORDED

    def forgotten(self, tenant: str, session_id: str) -> None:
        """Nothing was written of it."""
