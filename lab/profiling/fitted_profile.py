"""Makes a profile from measured points, with its provenance, and a report of how well it fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec

from plait.backends.profiles import Attention, Fit, Forward, Kv, Link, LongPrefill, Pivot, Profile, ProfileSource
from plait.lab.profiling.engine_probe import EngineIdentity
from plait.lab.profiling.profile_fit import FittedModel, Point, Residual, fit_cost_model
from plait.lab.profiling.profile_plan import Kind
from plait.lab.profiling.profiler import Measured
from plait.lab.profiling.tier_loads import Loaded, fit_link
from plait.policy.costs.cost_model import CostModel, PiecewiseLinear
from plait.policy.costs.tier_link import BYTES_PER_TOKEN

DIGITS = 6
"""Significant digits of a coefficient: more than any measurement has."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts that do not come from the engine: today's date, Plait's version, and the user's options."""

    date: str
    version: str
    accelerator: str | None = None
    told: tuple[str, ...] = ()
    kv_bytes_per_token: int | None = None


@dataclass(frozen=True, slots=True)
class FittedProfile:
    """The profile, and each point with the profile's prediction."""

    profile: Profile
    residuals: list[Residual]
    request_s: float
    prompt_token_s: float

    def report(self) -> str:
        """A table of points, measured and fitted times, and a summary."""
        lines = [f"{'measured':<32} {'new':>7} {'context':>8} {'batch':>5} {'ms':>10} {'fitted':>10} {'error':>7}"]
        lines += [_row(residual) for residual in self.residuals]
        fit, pivot = self.profile.fit, self.profile.pivot
        if fit is not None:
            mean, most = fit.mean_relative_error, fit.max_relative_error
            lines.append(f"{fit.points} points, relative error {mean:.1%} in the mean, {most:.1%} at most")
        if pivot is not None:
            lines.append(f"pivot forward size {pivot.tokens} tokens, {pivot.time_ms:.1f} ms")
        for link in self.profile.kv.links:
            lines.append(f"link from {link.tier}: {link.gbytes_per_s:.3g} GB/s, {link.latency_ms:.3g} ms for each load")
        ahead = "cannot be told" if self.profile.ahead is None else self.profile.ahead
        lines.append(f"iterations planned ahead: {ahead}")
        lines.append(
            f"outside its iterations a request takes {self.request_s * 1e3:.1f} ms and "
            f"{self.prompt_token_s * 1e6:.2f} us for each prompt token (not in the profile)"
        )
        return "\n".join(lines)


def fit_profile(
    measured: Measured,
    identity: EngineIdentity,
    circumstances: Circumstances,
    loads: Mapping[str, Sequence[Loaded]] | None = None,
) -> FittedProfile:
    """Fit a profile, with a link for each tier that has enough loads, and a record of the measurement.

    Raises ValueError if there are too few measurements.
    """
    fitted = fit_cost_model(measured.points)
    bytes_per_token = circumstances.kv_bytes_per_token or BYTES_PER_TOKEN
    kv = Kv(identity.limits.cache_tokens, bytes_per_token, list(_links(loads or {}, bytes_per_token)))
    source = _source(measured, identity, circumstances, fitted.request_s)
    if kv.links:
        source = _with_links(source, kv, loads or {}, assumed=circumstances.kv_bytes_per_token is None)
    written = written_profile(fitted, measured.points, source, kv)
    ahead = None if measured.queueing is None else measured.queueing.ahead(fitted.request_s)
    return replace(written, profile=msgspec.structs.replace(written.profile, ahead=ahead))


def written_profile(fitted: FittedModel, points: Sequence[Point], source: ProfileSource, kv: Kv) -> FittedProfile:
    """The fitted model as a profile, with its errors at these points after the coefficients were rounded."""
    profile = _profile(fitted.costs, source, kv)
    written = replace(fitted, costs=profile.cost_model())
    residuals = [written.residual(point) for point in points]
    errors = [abs(residual.relative_error) for residual in residuals]
    pivot = written.costs.pivot()
    profile = msgspec.structs.replace(
        profile,
        fit=Fit(len(errors), _rounded(fmean(errors)), _rounded(max(errors))),
        pivot=None if pivot is None else Pivot(pivot.tokens, _rounded(pivot.time_s * 1e3)),
    )
    return FittedProfile(profile, residuals, fitted.request_s, fitted.prompt_token_s)


def _links(loads: Mapping[str, Sequence[Loaded]], bytes_per_token: int) -> Iterator[Link]:
    for tier, of_tier in loads.items():
        link = fit_link(tier, of_tier)
        if link is not None:
            gbytes_per_s = bytes_per_token / link.token_s / 1e9
            yield Link(tier, _rounded(gbytes_per_s), _rounded(link.latency_s * 1e3))


def _with_links(
    source: ProfileSource, kv: Kv, loads: Mapping[str, Sequence[Loaded]], *, assumed: bool
) -> ProfileSource:
    tokens = {link.tier: [load.tokens for load in loads[link.tier]] for link in kv.links}
    ranges = ", ".join(f"{min(sizes)} to {max(sizes)} tokens from {tier}" for tier, sizes in tokens.items())
    return msgspec.structs.replace(
        source,
        provenance=f"{source.provenance} Links: from the engine's times of loads of {ranges}.",
        extrapolated=source.extrapolated + (" Bytes of a token: assumed; GB/s follow from them." if assumed else ""),
    )


def _profile(model: CostModel, source: ProfileSource, kv: Kv) -> Profile:
    long = model.long_attention
    return Profile(
        source=source,
        forward=_curve(model.forward),
        with_prompts=None if model.with_prompts is None else _curve(model.with_prompts),
        attention=Attention(_rounded(model.context_s * 1e3)),
        long_prefill=LongPrefill(
            long.threshold, *(_rounded(value * 1e3) for value in (long.new_s, long.sequence_s, long.product_s))
        ),
        kv=kv,
    )


def _curve(curve: PiecewiseLinear) -> Forward:
    return Forward([(size, _rounded(time_s * 1e3)) for size, time_s in curve.knots], _rounded(curve.slope_s * 1e3))


def _source(
    measured: Measured, identity: EngineIdentity, circumstances: Circumstances, request_s: float
) -> ProfileSource:
    fingerprint = f", system fingerprint {measured.fingerprint}" if measured.fingerprint else ""
    ranges = ". ".join(_range(kind, measured.points) for kind in Kind if _of(kind, measured.points))
    provenance = (
        f"plait profile {circumstances.version} on {circumstances.date}: medians of {measured.samples} measurements at "
        f"{len(measured.points)} points of the unloaded engine. {ranges}. "
        f"Each request also takes {request_s * 1e3:.1f} ms beside its computation; the profile leaves this out."
    )
    return ProfileSource(
        engine=f"{identity.engine}{fingerprint}",
        model=identity.model,
        accelerator=circumstances.accelerator or "not told",
        provenance=provenance,
        extrapolated=" ".join(_extrapolated(measured, identity, circumstances)),
    )


def _extrapolated(measured: Measured, identity: EngineIdentity, circumstances: Circumstances) -> Iterator[str]:
    sizes = [sum(new for new, _ in iteration) for point in measured.points for iteration in point.iterations]
    contexts = [context for point in measured.points for iteration in point.iterations for _, context in iteration]
    yield f"Iterations of more than {max(sizes)} new tokens, calls behind more than {max(contexts)} of context."
    yield "Iterations that prefill and decode at once: composed of both."
    if not _of(Kind.CACHED_PREFIX, measured.points):
        yield "Prefill behind a cached prefix: from prompts without one."
    yield from (f"{what}: as told on the command line." for what in circumstances.told)
    if identity.limits.kv_tokens is None:
        yield "KV cache: not reported, so the context length is taken."
    if identity.limits.budget_tokens is None:
        yield "Token budget: not reported, so long prompts are assumed to take one iteration."
    yield from (f"Not measured: {omission}." for omission in measured.omitted)


def _of(kind: Kind, points: Iterable[Point]) -> list[Point]:
    return [point for point in points if point.kind == kind]


def _range(kind: Kind, points: Iterable[Point]) -> str:
    """The sizes of a kind's points, from the smallest to the largest."""
    works = [[call for iteration in point.iterations for call in iteration] for point in _of(kind, points)]
    if kind is Kind.DECODE:
        batches = sorted(len(work) for work in works)
        contexts = sorted(context for work in works for _, context in work)
        return f"Decode in batches of {batches[0]} to {batches[-1]} behind {contexts[0]} to {contexts[-1]} tokens"
    new = sorted(sum(tokens for tokens, _ in work) for work in works)
    first = sorted(work[0][1] for work in works)
    behind = f" behind {first[0]} to {first[-1]} cached" if first[-1] else ""
    role = " (held out, as a check)" if kind is Kind.CHUNKED else ""
    return f"{kind.capitalize()}: {new[0]} to {new[-1]} tokens{behind}{role}"


def _row(residual: Residual) -> str:
    point = residual.point
    first, batch = point.iterations[0], len(point.iterations[0])
    new = sum(tokens for iteration in point.iterations for tokens, _ in iteration)
    milliseconds, fitted = point.seconds * 1e3, residual.predicted_s * 1e3
    error = residual.relative_error
    return f"{point.kind:<32} {new:>7} {first[0][1]:>8} {batch:>5} {milliseconds:>10.3f} {fitted:>10.3f} {error:>+7.1%}"


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
