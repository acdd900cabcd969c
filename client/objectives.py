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
