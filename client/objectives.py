"""The objectives that a program can give its calls: `latency`, `throughput`, or an SLO."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Objective(StrEnum):
    """The objective of the calls that produce a value (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Slo:
    """The times that a call must keep, in seconds; None: no limit.

    `ttft_s` is the time to the first token, `tpot_s` the mean time per further token, `jct_s` the time to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None


Wanted = Objective | str | Slo | None
"""The objective of a `get`: `latency`, `throughput`, an `Slo` (in seconds), or None."""


def criteria(wanted: Wanted) -> object:
    """The objective of a `get` as it is sent. Raises `ValueError` for an unknown objective."""
    if isinstance(wanted, Slo):
        given = {"ttft_ms": wanted.ttft_s, "tpot_ms": wanted.tpot_s, "jct_ms": wanted.jct_s}
        return {key: in_ms(value) for key, value in given.items() if value is not None}
    return None if wanted is None else Objective(wanted).value


def in_ms(seconds: float | None) -> float | None:
    """Seconds in the gateway's unit."""
    return None if seconds is None else seconds * 1000
