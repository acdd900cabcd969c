"""Why a call has failed, link by link: what an error object carries as its `causes`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One link of a chain of causes, as far as it is known: the id of a `call`, the `engine` that failed it, the
    `transform` that refused its text, the `variable` that has failed with it, and a `message` for people.
    """

    call: str | None = None
    engine: str | None = None
    transform: str | None = None
    variable: str | None = None
    message: str

    def __str__(self) -> str:
        return self.message if self.call is None else f"{self.call}: {self.message}"


def chain_text(causes: Iterable[FailureCause]) -> str:
    """A chain of causes on one line."""
    return ", because ".join(map(str, causes))
