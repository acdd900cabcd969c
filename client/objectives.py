"""What a program can ask of its calls: an objective, or times of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Objective(StrEnum):
    """What the calls behind a value are optimised for (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Slo:
    """Times that a call has to keep, in seconds; None where there is none.

    `ttft_s` is the time to the first token, `tpot_s` the mean time per further token, `jct_s` the time to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None
