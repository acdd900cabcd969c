"""The log of a session: the events from which a new executor can rebuild it (event sourcing).

Only events that do not follow from others are written: a call that fails because its input failed is not. `replay`
sends the events to a new executor in order. A form of an event is only added to, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import msgspec

from plait.gateway.guests.programs.core.held_call import HeldCall, KeptRequest
from plait.gateway.guests.programs.core.session_errors import SKIPPED, FailureCause
from plait.policy.types import Objective


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="opened"):
    """The session begins."""

    ttl_s: float


class Kept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The session is in use: its time to live, now `ttl_s`, begins again."""

    ttl_s: float


class Preferred(msgspec.Struct, frozen=True, array_like=True, tag="preferred"):
    """The client states an objective for the session."""

    objective: Objective


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The session takes no more calls and values."""


class Submitted(msgspec.Struct, frozen=True, array_like=True, tag="submitted"):
    """A call was added. `inputs` has also the variable of its condition. A replay makes the call from `request`."""

    call_id: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    fingerprint: bytes | None
    request: KeptRequest


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A call is sent to engines once more for its current output. Bounds the attempts of a call across restarts."""

    call_id: str


class ValueSet(msgspec.Struct, frozen=True, array_like=True, tag="value"):
    variable: str
    value: str

    call_id: str | None = None
    """The producer; None: a client set the value."""

    text: str | None = None
    """The completion's text, from which the transform made the value; None without a transform."""

    was_cut: bool = False
    """Whether the text ended at the output limit."""

    answer: bytes | None = None
    """The body of the call's answer to its client; None for a stream, or without a client."""


class CallEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A call has ended without finishing, and not because an input failed."""

    call_id: str
    what: FailureCause | str
    how: Literal["failed", "cancelled"]
    """A skipped call is `cancelled`."""

    @property
    def is_skip(self) -> bool:
        return isinstance(self.what, FailureCause) and self.what.code == SKIPPED


class VariableFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A variable without a producer has failed."""

    variable: str
    where: str
    """The client, or the refused call, that failed it."""
    what: FailureCause


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The id of a deleted session is refused until `until_unix_s`."""

    until_unix_s: float


SessionEvent = (
    Opened | Kept | Preferred | Closed | Submitted | Started | ValueSet | CallEnded | VariableFailed | Refused
)

T = TypeVar("T")


class Unrecorded:
    """The record of a session that is in memory only: all methods do nothing. A durable session has a subclass."""

    __slots__ = ()

    stores = False
    """Whether anything is written."""

    @property
    def is_durable(self) -> bool:
        """Whether all events so far will outlive the process, if that was promised."""
        return True

    async def once_stored(self, answer: T, unstored: Callable[[T], T], *, is_begun: bool = False) -> T:  # noqa: ARG002
        """Wait for the commit of all events so far. Returns `answer`, or `unstored(answer)` if they cannot be stored.

        Make `answer` before the call: events that come while this waits are not waited for. Raises `PlaitError` if no
        client may be answered, because another gateway may own the session. With `is_begun` (the answer's status was
        sent), waits out an outage of the store.
        """
        return answer

    async def settled(self) -> None:
        """Wait until all events so far are stored, or cannot be."""
        await self.once_stored(None, lambda nothing: nothing, is_begun=True)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make one batch of the events in the block: all of them are stored or none."""
        yield

    def opened(self, ttl_s: float, now_s: float) -> None: ...

    def touched(self, ttl_s: float, now_s: float) -> None:
        """The session is in use: its time to live begins again."""

    def submitted(self, call: HeldCall, now_s: float) -> None: ...

    def write(self, event: SessionEvent, now_s: float) -> None:
        """Append an event that has no method of its own."""

    def deleted(self, until_s: float, now_s: float) -> None:
        """A client deleted the session. Its id is refused until `until_s`."""

    def ended(self) -> None:
        """The session has ended: remove its stream from the log."""


UNRECORDED = Unrecorded()


class Records:
    """The log of all sessions. This class is for a gateway without one, which records nothing."""

    def freeze(self) -> None:
        """Write nothing from now on: the end of the process must not end its sessions."""

    def check(self) -> None:
        """Raise `PlaitError` while the log is being read at a start, so that sessions cannot be used yet."""

    def make(self, tenant: str, session_id: str) -> None:
        """Rebuild the session from its record, if it has one and is not in memory yet."""

    def new(self, tenant: str, session_id: str, *, durable: bool) -> Unrecorded:  # noqa: ARG002
        """The record of a new session. Raises `PlaitError` if a durable one is wanted and the store is out of reach."""
        return UNRECORDED

    def forgotten(self, tenant: str, session_id: str) -> None:
        """The id of a deleted session is not refused any more: drop it from the log."""
