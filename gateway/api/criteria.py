"""The criteria of a get as clients write them (Parrot, section 7): an objective, or figures in milliseconds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.policy.programs.needs import Mark
from plait.policy.types import NO_SLO, Objective, Slo

Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of a get, in milliseconds: the fields of a call's `plait`. Their short names are older."""

    slo_ttft_ms: Milliseconds | None = None
    slo_tpot_ms: Milliseconds | None = None
    slo_jct_ms: Milliseconds | None = None
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    jct_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms", "jct_ms"):
            older, newer = getattr(self, name), getattr(self, f"slo_{name}")
            if older is not None and newer not in (None, older):
                raise ValueError(f"slo_{name} and {name} are the same objective; give one of them")

    def slo(self) -> Slo:
        """The same objectives, in seconds."""
        return Slo(
            _seconds(self.slo_ttft_ms or self.ttft_ms),
            _seconds(self.slo_tpot_ms or self.tpot_ms),
            _seconds(self.slo_jct_ms or self.jct_ms),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


Criteria = Objective | Figures


def mark_of(criteria: Criteria | None) -> Mark | None:
    """The objective that a get with these criteria asks for; None if it asks for none."""
    mark = criteria.slo() if isinstance(criteria, Figures) else criteria
    return None if mark == NO_SLO else mark
