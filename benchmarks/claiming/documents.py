"""What is claimed of questions on documents: admission costs little while engines keep up, and no calls beyond that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.filling.claims import LEAST_COMPLETED, places, ratio
from benchmarks.filling.runs import AT_ONCE, Results
from benchmarks.filling.systems import ADMISSION, BASELINES, NONE
from plait.lab.simulation.claim import Claim

WITHIN: Final = 1.05
"""Mean TTFT and E2E, over those without admission."""


def document_claims(results: Results) -> Iterator[Claim]:
    """At each load but all at once, from which only the saturation is taken."""
    for place in places(results):
        if place.load <= 1:
            for field, name in (("ttft_mean_s", "mean TTFT"), ("e2e_mean_s", "mean E2E")):
                value = ratio(results, place, ADMISSION, field)
                yield Claim(f"{name}, {ADMISSION} / {NONE}, {place}", value, most=WITHIN)
        elif place.load < AT_ONCE:
            value = ratio(results, place, ADMISSION, "completed_per_s", BASELINES)
            name = f"calls/s, {ADMISSION} / the better of {', '.join(BASELINES)}, {place}"
            yield Claim(name, value, least=LEAST_COMPLETED)
