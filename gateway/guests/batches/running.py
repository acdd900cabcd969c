"""One batch that runs here, and whether it will miss its window."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from plait.gateway.guests.batches.batch import Batch, BatchError
from plait.gateway.guests.batches.checking import CheckedLines
from plait.gateway.guests.batches.desk import LineAnswer
from plait.policy.batches.line_order import LinesLeft

LATE: Final = 1.2
"""A batch is late if at its rate so far its lines would take so many times the rest of its window."""

KNOWN: Final = 0.02
"""The rate of a batch is known after this part of its window. Before, none of its lines may have ended yet."""


@dataclass(slots=True)
class Running:
    """A batch that runs here."""

    batch: Batch
    is_cancelled: bool = False
    errors: tuple[BatchError, ...] = ()
    """Why it is cancelled, unless the client wants it."""
    lines: CheckedLines | None = None
    left: LinesLeft = field(default_factory=lambda: LinesLeft((), (), ()))
    """The lines that are not sent yet."""
    asked: set[asyncio.Task[None]] = field(default_factory=set)
    sent: set[int] = field(init=False)
    """The lines that are on engines; those of the gateway before until this one has begun."""
    has_begun: bool = False
    ready: list[LineAnswer] = field(default_factory=list)
    """Answers that are not written yet."""
    ready_bytes: int = 0
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while they are written."""
    saved: Batch = field(init=False)
    """The batch as it was written last: all answers that it counts are written."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a line has ended, or when the batch may be cancelled, over or lost."""
    lost: bool = False
    """Whether another gateway has the batch."""
    defect: BaseException | None = None
    """What ended the task of a line: `NotOwnerError`, or a defect by which not even the line's error can be written."""
    is_written: bool = False
    """Whether no more answers come."""
    began_s: float = 0.0
    """When its lines began to be sent here, and `ended` of them have an answer since."""
    ended: int = 0
    refused: int = 0
    """Lines that wait until they are sent again, since the tenant was at a limit or the engine had no room."""
    is_waiting: bool = False
    """Whether lines wait for room, in the turns of the tenants."""

    def __post_init__(self) -> None:
        self.saved = self.batch
        self.sent = set(self.batch.sent)

    def begin(self, left: Iterable[int]) -> None:
        """Count what was on engines when the gateway before died; `left` are the lines without an answer."""
        self.batch, self.has_begun = self.batch.begun(left), True
        self.sent.clear()

    def stop(self) -> None:
        """The gateway stops in order: that is no death, and no line is cut off."""
        if self.has_begun:
            self.batch, self.has_begun = self.batch.stopped(), False
            self.sent.clear()

    @property
    def is_sending(self) -> bool:
        """Whether lines are left that may be sent."""
        return bool(self.left) and not (self.lost or self.is_cancelled or self.is_over or self.defect)

    @property
    def is_over(self) -> bool:
        """Whether no more lines are sent: the batch is cancelled, or its window is over."""
        return self.batch.status != "in_progress" or time.time() > self.batch.expires_at

    @property
    def is_late(self) -> bool:
        """Whether its window would be over before its lines, at the rate so far."""
        now_s = time.time()
        return LATE * self._left_s(now_s) > self.batch.expires_at - now_s

    @property
    def window(self) -> float:
        """The part of its window that it is predicted to take."""
        now_s, batch = time.time(), self.batch
        return (now_s + self._left_s(now_s) - batch.created_at) / (batch.expires_at - batch.created_at)

    def _left_s(self, now_s: float) -> float:
        """How long its lines are predicted to take; 0 while too little is known."""
        batch, for_s = self.batch, now_s - self.began_s
        if for_s < KNOWN * (batch.expires_at - batch.created_at):
            return 0.0
        return len(self.left) * for_s / (self.ended + 1)
