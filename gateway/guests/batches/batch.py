"""A batch as it is stored and as clients see it, and its states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]

TRANSITIONS: Final[dict[Status, frozenset[Status]]] = {
    "validating": frozenset(("failed", "in_progress", "cancelling", "expired")),
    "in_progress": frozenset(("finalizing", "cancelling", "expired", "failed")),
    "finalizing": frozenset(("completed", "failed")),
    "cancelling": frozenset(("cancelled", "failed")),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}

ACTIVE: Final = tuple(status for status, following in TRANSITIONS.items() if following)
"""The states of a batch that has a gateway."""


ASKED: Final = ("endpoint", "input_file_id", "completion_window", "metadata", "output_expires_in_s")
"""What a client says of a batch that it makes."""


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch has failed; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct, frozen=True):
    """Times are in seconds from 1970. `at` has when the batch entered each state."""

    id: str
    tenant: str
    """What is stored of it."""
    identity: str
    """The tenant's identity in the gateways that have its secret."""
    key: str
    """The id of the API key by which it was made."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    at: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    output_expires_in_s: int | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    usage: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Tokens: of prompts, cached ones among them, of answers, of reasoning among them."""
    deaths: int = 0
    """How many gateways have begun to run it and have not stopped in order: the dead ones, and the one that runs it."""
    sent: tuple[int, ...] = ()
    """The lines that were on engines when it was written."""
    cut_off: dict[int, int] = {}
    """The lines without an answer that were on engines when gateways died, each with the number of deaths."""

    def entered(self, status: Status, now: int, **changes: Any) -> Batch:
        """The batch in another state. Raises ValueError for one that does not follow."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"batch {self.id} is {self.status} and cannot become {status}")
        return msgspec.structs.replace(self, status=status, at={**self.at, status: now}, **changes)

    def begun(self, left: Iterable[int]) -> Batch:
        """The batch with one more gateway; `left` are the lines without an answer."""
        counts = Counter(self.cut_off) + Counter(self.sent)
        cut_off = {line: counts[line] for line in counts.keys() & left}
        return msgspec.structs.replace(self, deaths=self.deaths + 1, sent=(), cut_off=cut_off)

    def stopped(self) -> Batch:
        """The batch whose gateway stops in order."""
        return msgspec.structs.replace(self, deaths=self.deaths - 1)

    def counted(self, failed: bool, used: tuple[int, int, int, int]) -> Batch:
        """The batch with one more line that has ended."""
        prompt, cached, output, reasoning = map(sum, zip(self.usage, used, strict=True))
        completed, lost = self.completed + (not failed), self.failed + failed
        usage = prompt, cached, output, reasoning
        return msgspec.structs.replace(self, completed=completed, failed=lost, usage=usage)

    def is_same(self, later: Batch, within_s: int) -> bool:
        """Whether the same was asked for as of a `later` batch, and so short before."""
        return self.created_at >= later.created_at - within_s and all(
            getattr(self, name) == getattr(later, name) for name in ASKED
        )

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        at, (prompt, cached, output, reasoning) = self.at, self.usage
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "in_progress_at": at.get("in_progress"),
            "expires_at": self.expires_at,
            "finalizing_at": at.get("finalizing"),
            "completed_at": at.get("completed"),
            "failed_at": at.get("failed"),
            "expired_at": at.get("expired"),
            "cancelling_at": at.get("cancelling"),
            "cancelled_at": at.get("cancelled"),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + output,
            },
        }
