"""What an engine adds to its forward passes: `plait profile`'s points on it against the shipped profile of passes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from benchmarks.gpu.section import Figures, Fleet
from plait.backends.profiles import load_profile
from plait.lab.profiling.engine_probe import EngineProbe
from plait.lab.profiling.fitted_profile import Circumstances, fit_profile
from plait.lab.profiling.profile_fit import FittedModel, Residual
from plait.lab.profiling.profile_plan import FULL, QUICK, Effort
from plait.lab.profiling.profiler import Profiler

SHIPPED = "h200-llama-8b"
LIMIT_SHARE = 0.8
"""Of the section's time: the rest is for the fit, and for a round that takes longer than the one before."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    effort: Effort


GPU = Plan(replace(FULL, repeats=3))
CPU = Plan(replace(QUICK, repeats=1, batches=(1, 4), ladder=(16, 128, 512, 1024), chunks=(2,)))


async def measure(plan: Plan, fleet: Fleet, seconds: float, figures: Figures) -> None:
    """Profile the first engine, fit, and compare."""
    engine = fleet.engines[0]
    engine.empty_cache()
    effort = replace(plan.effort, limit_s=LIMIT_SHARE * seconds)
    log: list[str] = figures.setdefault("progress", [])
    async with EngineProbe(engine.url) as probe:
        identity = await probe.identify()
        measured = await Profiler(probe, identity.limits, effort, random.Random(), log.append).measure()
    shipped = FittedModel(load_profile(SHIPPED).cost_model())
    figures["omitted"] = measured.omitted
    figures[f"errors of {SHIPPED}"] = _errors([shipped.residual(point) for point in measured.points])
    figures["points"] = [_row(shipped.residual(point)) for point in measured.points]
    fitted = fit_profile(measured, identity, Circumstances("", ""))
    figures["errors of the fit"] = _errors(fitted.residuals)
    figures["request (s)"] = fitted.request_s
    figures["fitted profile"] = fitted.profile.toml()


def _errors(residuals: Sequence[Residual]) -> Figures:
    """By kind of point: how many, and the mean and the median of predicted / measured - 1."""
    kinds = dict.fromkeys(residual.point.kind for residual in residuals)
    by_kind = {kind: [one.relative_error for one in residuals if one.point.kind == kind] for kind in kinds}
    return {
        str(kind): {"points": len(errors), "mean": fmean(errors), "median": median(errors)}
        for kind, errors in by_kind.items()
    }


def _row(residual: Residual) -> list[object]:
    """Kind, iterations as (calls, new tokens, context of the first call), measured and predicted milliseconds."""
    point = residual.point
    iterations = [(len(calls), sum(new for new, _ in calls), calls[0][1]) for calls in point.iterations]
    return [str(point.kind), iterations, round(point.seconds * 1e3, 3), round(residual.predicted_s * 1e3, 3)]
