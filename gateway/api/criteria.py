"""The criteria of a get as clients write them (Parrot, section 7): an objective, or figures in milliseconds."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from plait.policy.programs.objectives_marks import Mark
from plait.policy.types import NO_SLO, Objective, Slo

Milliseconds = Annotated[float, Meta(gt=0, le=1e12)]


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objectives of a get, in milliseconds."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    jct_ms: Milliseconds | None = None

    def slo(self) -> Slo:
        """The same objectives, in seconds."""
        figures = (self.ttft_ms, self.tpot_ms, self.jct_ms)
        return Slo(*(None if figure is None else figure / 1e3 for figure in figures))


Criteria = Objective | Figures


def mark_of(criteria: Criteria | None) -> Mark | None:
    """The objective that a get with these criteria asks for; None if it asks for none."""
    mark = criteria.slo() if isinstance(criteria, Figures) else criteria
    return None if mark == NO_SLO else mark
