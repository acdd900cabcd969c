"""Why a call failed, as a chain of causes: the `causes` of an error object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec


class FailureCause(msgspec.Struct, frozen=True, kw_only=True):
    """One link of a chain of causes. Fields that are not known are None.

    `call` is the id of the call that failed. `engine` is the engine at fault. `transform` is the transform that refused
    the call's text. `variable` is an output that failed with the call. `message` is for people. `transient` is True if
    the same call may succeed when it is sent again. `code` is the code of all errors that this root leads to; unset if
    they have the usual codes.
    """

    call: str | None = None
    engine: str | None = None
    transform: str | None = None
    variable: str | None = None
    message: str
    transient: bool = False
    code: str | msgspec.UnsetType = msgspec.UNSET

    def __str__(self) -> str:
        return self.message if self.call is None else f"{self.call}: {self.message}"


CANCELLED: Final = FailureCause(message="a client cancelled it", transient=True)
UNWANTED: Final = FailureCause(message="nobody waits for it any more", transient=True)
"""Why a call was cancelled. It may succeed when it is sent again."""


def chain_text(causes: Iterable[FailureCause]) -> str:
    """A chain of causes on one line."""
    return ", because ".join(map(str, causes))
