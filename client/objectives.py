"""The objectives that a program can give its calls: `latency`, `throughput`, or an SLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Objective(StrEnum):
    """The objective of the calls that produce a value (Parrot, section 5.2)."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"

    @classmethod
    def _missing_(cls, value: object) -> Objective:
        raise ValueError(f"an objective is {value!r}; expected {' or '.join(cls)}")


@dataclass(frozen=True, slots=True)
class Slo:
    """The times that a call must keep, in seconds; None: no limit.

    `ttft_s` is the time to the first token, `tpot_s` the mean time per further token, `jct_s` the time to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None


Figures = Mapping[str, float | None]
"""An SLO by the names that headers and bodies have: `slo_ttft_ms`, `slo_tpot_ms`, `slo_jct_ms`, in milliseconds."""

FIGURES: Final = ("slo_ttft_ms", "slo_tpot_ms", "slo_jct_ms")

Wanted = Objective | str | Slo | Figures | None
"""The objective of a `get`: `latency`, `throughput`, an SLO, or None."""


def criteria(wanted: Wanted) -> object:
    """The objective of a `get` as it is sent. Raises `ValueError` for an unknown objective."""
    if isinstance(wanted, Slo | Mapping):
        return figures(wanted)
    return None if wanted is None else Objective(wanted).value


def figures(slo: Slo | Figures | None) -> dict[str, float]:
    """An SLO as it is sent. Raises `ValueError` for an unknown name."""
    if slo is None:
        return {}
    if isinstance(slo, Slo):
        seconds = zip(FIGURES, (slo.ttft_s, slo.tpot_s, slo.jct_s), strict=True)
        return {name: value * 1000 for name, value in seconds if value is not None}
    for name in slo:
        if name not in FIGURES:
            raise ValueError(f"{name!r} is no objective; the objectives are {', '.join(FIGURES)}")
    return {name: value for name, value in slo.items() if value is not None}
