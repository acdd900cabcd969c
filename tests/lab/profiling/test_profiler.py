"""The profiler against an engine in virtual time: what it asks for, what it makes of it, and when it stops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plait.backends.profiles import load_profile
from plait.lab.embedded.engine import EngineSettings
from plait.lab.profiling.engine_probe import EngineIdentity
from plait.lab.profiling.fitted_profile import Circumstances, FittedProfile, fit_profile
from plait.lab.profiling.profile_plan import FULL, QUICK, Effort, Kind, Limits, chunks
from plait.lab.profiling.profiler import Measured, Profiler, Queueing, typical
from plait.lab.profiling.timed_stream import TimedStream
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear
from tests.lab.profiling.embedded_engine import EmbeddedEngine

LIMITS = Limits(context_tokens=16_384, budget_tokens=2048, kv_tokens=100_000)
CIRCUMSTANCES = Circumstances(date="2026-01-02", version="1.2.3")
MODEL = load_profile("h100-llama-70b-tp2").cost_model()
GRID = (
    [(1, 100)],
    [(1, 3_000)],
    [(1, 500)] * 3,
    [(1, 2_000)] * 8,
    [(100, 0)],
    [(300, 0)],
    [(700, 0)],
    [(1_800, 0)],
    [(64, 2_000)],
    [(200, 2_500)],
    [(700, 6_000)],
    [(512, 0), *[(1, 1_000)] * 6],
)
"""Iterations between the points that are measured: decodes, prompts, prompts behind a cached prefix, and both."""
BLOCK_TOKENS = 64
OVERHEAD_S = 0.004


class VirtualEngine:
    """Takes as long as its cost model says, on a clock of its own; every prompt stays cached in whole blocks."""

    def __init__(self, costs: CostModel = MODEL, *, slowness: float = 1.0, max_running_calls: int = 64) -> None:
        self.now_s = 100.0
        self.caches = self.reports_cached = True
        self.hangs_at_batch = self.busy_after = 1_000_000
        self.calls: list[tuple[list[Sequence[int]], int]] = []
        self._costs = costs
        self._slowness = slowness
        self._max_running_calls = max_running_calls
        self._cached: set[int] = set()

    @property
    def clock(self) -> Callable[[], float]:
        return lambda: self.now_s

    async def check_idle(self) -> None:
        if len(self.calls) > self.busy_after:
            raise ValueError("busy")

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        self.calls.append((list(prompts), output_tokens))
        if len(prompts) >= self.hangs_at_batch:
            await asyncio.Event().wait()
        streams = [TimedStream(self.now_s, prompt_tokens=len(prompt), fingerprint="virtual") for prompt in prompts]
        self.now_s += OVERHEAD_S
        for start in range(0, len(streams), self._max_running_calls):
            end = start + self._max_running_calls
            self._run(streams[start:end], prompts[start:end], output_tokens)
        return streams

    def _run(self, streams: list[TimedStream], prompts: Sequence[Sequence[int]], output_tokens: int) -> None:
        for stream, prompt in zip(streams, prompts, strict=True):
            cached = self._look_up(prompt)
            for iteration in chunks(len(prompt) - cached, cached, LIMITS.budget_tokens):
                self._compute(iteration)
            stream.cached_tokens = cached if self.reports_cached else None
            stream.arrivals.append((self.now_s, 1))
        for token in range(2, output_tokens + 1):
            self._compute([(1, len(prompt) + token - 2) for prompt in prompts])
            for stream in streams:
                stream.arrivals.append((self.now_s, token))

    def _compute(self, work: Sequence[tuple[int, int]]) -> None:
        self.now_s += self._slowness * self._costs.iteration_time_s(work)

    def _look_up(self, prompt: Sequence[int]) -> int:
        ends = range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)
        blocks = [hash(tuple(prompt[:end])) for end in ends]
        cached = 0
        while self.caches and cached < len(blocks) and blocks[cached] in self._cached:
            cached += 1
        self._cached.update(blocks)
        return cached * BLOCK_TOKENS


def measure(engine: VirtualEngine, effort: Effort = QUICK, limits: Limits = LIMITS) -> tuple[Measured, list[str]]:
    lines: list[str] = []
    return asyncio.run(Profiler(engine, limits, effort, random.Random(7), lines.append).measure()), lines


def fit(measured: Measured, limits: Limits = LIMITS, circumstances: Circumstances = CIRCUMSTANCES) -> FittedProfile:
    return fit_profile(measured, EngineIdentity("vllm host:1", "m", limits), circumstances)


def kinds(measured: Measured) -> set[str]:
    return {point.kind for point in measured.points}


@pytest.mark.parametrize("effort", [QUICK, FULL])
def test_the_engines_own_model_comes_back(effort: Effort) -> None:
    measured, _ = measure(VirtualEngine(), effort)
    assert kinds(measured) == set(Kind)
    assert measured.omitted == []
    found = fit(measured)
    assert found.request_s == pytest.approx(OVERHEAD_S, rel=0.1)
    fitted = found.profile
    assert fitted.fit is not None
    assert fitted.fit.points == len(measured.points)
    assert fitted.fit.max_relative_error < 0.03
    model = fitted.cost_model()
    for work in ([(1, 100)], [(1, 3_000)] * 6, [(300, 0)], [(1_500, 6_000)], [(400, 2_000), *[(1, 900)] * 9]):
        assert model.iteration_time_s(work) == pytest.approx(MODEL.iteration_time_s(work), rel=0.05)
    pivot = MODEL.pivot()
    assert pivot is not None
    assert fitted.pivot is not None
    assert fitted.pivot.tokens == pytest.approx(pivot.tokens, rel=0.1)
    assert fitted.pivot.time_ms == pytest.approx(pivot.time_s * 1e3, rel=0.1)


def test_an_embedded_engines_profile_comes_back() -> None:
    """The real engine, whose cache and iterations are those of `plait engine`."""
    own = load_profile("a6000-mistral-7b").cost_model()
    engine = EmbeddedEngine(EngineSettings(name="e", model="m", kv_tokens=198_516), own)
    limits = Limits(context_tokens=16_384, budget_tokens=2048, kv_tokens=198_516)
    measured = asyncio.run(Profiler(engine, limits, QUICK, random.Random(7), lambda _: None).measure())
    assert measured.omitted == []
    fitted = fit(measured, limits).profile
    assert fitted.fit is not None
    assert fitted.fit.points == len(measured.points) > 20
    assert fitted.fit.max_relative_error < 0.02
    model = fitted.cost_model()
    for work in GRID:
        assert model.iteration_time_s(work) == pytest.approx(own.iteration_time_s(work), rel=0.05), work
    assert fitted.pivot is not None
    saturation = own.forward.slope_s * fitted.pivot.tokens / own.forward.at(fitted.pivot.tokens)
    assert 0.85 < saturation < 0.97


STEPS = CostModel(
    forward=PiecewiseLinear(
        ((1, 4.9e-3), (4, 5.2e-3), (5, 5.7e-3), (8, 5.7e-3), (9, 6.7e-3), (16, 6.7e-3), (17, 9e-3), (64, 12e-3)), 1e-4
    ),
    context_constant_s=0.0,
    context_s=3e-8,
    context_floor_s=0.0,
    long_attention=LongAttention(0, 0.0, 1e-8, 9e-10),
    with_prompts=PiecewiseLinear(((1, 0.029), (900, 0.029)), 3.2e-5),
)
"""Decodes are CUDA graphs, and prompts are none."""


@pytest.mark.parametrize(("ahead", "effort"), [(0, QUICK), (1, FULL)])
@pytest.mark.parametrize("own", [STEPS, replace(STEPS, forward=MODEL.forward, with_prompts=None)])
def test_an_engines_steps_come_back_through_its_noise_and_whether_it_plans_ahead(
    own: CostModel, ahead: int, effort: Effort
) -> None:
    engine = EmbeddedEngine(EngineSettings(name="e", model="m", kv_tokens=200_000, ahead=ahead, jitter=0.05), own)
    limits = Limits(context_tokens=16_384, budget_tokens=2048, kv_tokens=200_000)
    measured = asyncio.run(Profiler(engine, limits, effort, random.Random(7), lambda _: None).measure())
    found = fit(measured, limits)
    assert found.profile.ahead == ahead
    assert f"iterations planned ahead: {ahead}\n" in found.report()
    model = found.profile.cost_model()
    assert (model.with_prompts is None) == (own.with_prompts is None)
    decodes = [[(1, 100)] * batch for batch in (3, 6, 7, 11, 13, 15)]
    within = 0.05 if effort is FULL else 0.08  # three repeats
    for work in [*decodes, *GRID]:
        assert model.iteration_time_s(work) == pytest.approx(own.iteration_time_s(work), rel=within), work


@pytest.mark.parametrize(
    ("waits", "request_s", "ahead"),
    [
        ([1] * 6, 0.002, 0),
        ([2] * 9 + [1, 3, 3], 0.002, 1),
        ([2] * 8 + [1, 3, 3], 0.002, None),  # they disagree
        ([1] * 5, 0.002, None),  # too few
        ([2] * 9, 0.006, None),  # one iteration may have ended before the request had come
        ([3] * 9, 0.002, None),
    ],
)
def test_what_cannot_be_told_is_not_said(waits: list[int], request_s: float, ahead: int | None) -> None:
    assert Queueing(0.01, waits).ahead(request_s) == ahead


def test_what_is_sent_fits_the_engine_and_is_new_each_time() -> None:
    engine = VirtualEngine()
    measured, _ = measure(engine)
    for prompts, output_tokens in engine.calls:
        assert all(len(prompt) + output_tokens <= LIMITS.context_tokens for prompt in prompts)
        assert sum(len(prompt) + output_tokens for prompt in prompts) <= 100_000
        assert all(300 <= token < 1300 for prompt in prompts for token in prompt)
    for point in measured.points:
        if point.kind == Kind.PREFILL:
            assert point.iterations[0][0][1] == 0, "nothing was cached"
        if point.kind == Kind.CACHED_PREFIX:
            assert point.iterations[0][0][1] > 0


def test_every_point_is_measured_once_a_round_and_each_group_is_announced() -> None:
    measured, lines = measure(VirtualEngine())
    assert measured.samples == QUICK.repeats * len(measured.points)
    assert len(lines) == QUICK.repeats * len(Kind) + 1
    assert lines[0].startswith("round 1: prefill, 16 points in ")


@pytest.mark.parametrize(
    ("samples", "value"),
    [([7.0], 7.0), ([1.0, 3.0], 2.0), ([1.0, 1.2, 9.0], 1.1), ([5.0, 1.0, 8.0, 1.1, 1.3], 1.1), ([3.0, 3.0, 1.0], 3.0)],
)
def test_what_lies_close_together_counts(samples: list[float], value: float) -> None:
    assert typical(samples) == pytest.approx(value)


def test_one_disturbed_round_does_not_move_a_point() -> None:
    engine = VirtualEngine()
    quiet, _ = measure(VirtualEngine())
    undisturbed = engine.complete

    async def complete(prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        engine._slowness = 5.0 if 43 < len(engine.calls) < 63 else 1.0
        return await undisturbed(prompts, output_tokens)

    engine.complete = complete  # type: ignore[method-assign]
    disturbed, _ = measure(engine)
    seconds = [point.seconds for point in disturbed.points]
    assert seconds == pytest.approx([point.seconds for point in quiet.points], rel=1e-6)


def test_what_the_rounds_disagree_about_is_measured_again() -> None:
    engine = VirtualEngine()
    undisturbed = engine.complete

    async def complete(prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        # Each of the first two rounds has its own pace: no two repeats agree.
        engine._slowness = 0.3 if len(engine.calls) < 30 else 0.15 if len(engine.calls) < 57 else 0.1
        return await undisturbed(prompts, output_tokens)

    engine.complete = complete  # type: ignore[method-assign]
    disturbed, lines = measure(engine)
    quiet, _ = measure(VirtualEngine(slowness=0.1))
    assert any(line.startswith("round 5: ") for line in lines)
    assert not any(line.startswith("round 9: ") for line in lines)
    seconds = [point.seconds for point in disturbed.points]
    assert seconds == pytest.approx([point.seconds for point in quiet.points], rel=0.01)


def test_a_batch_that_the_engine_does_not_run_is_left_out_with_the_larger_ones() -> None:
    measured, _ = measure(VirtualEngine(max_running_calls=6))
    batches = {len(point.iterations[0]) for point in measured.points}
    assert max(batches) == 5
    assert any("batch of 8: the engine does not run that many" in omission for omission in measured.omitted)
    assert "does not run that many" in fit(measured).profile.source.extrapolated


@pytest.mark.parametrize(
    ("caches", "reports", "reason"),
    [(False, True, "does not keep the prefix cached"), (True, False, "usage does not report cached tokens")],
)
def test_without_a_cache_that_can_be_seen_contexts_come_from_long_prompts(
    caches: bool, reports: bool, reason: str
) -> None:
    engine = VirtualEngine()
    engine.caches, engine.reports_cached = caches, reports
    measured, _ = measure(engine)
    assert kinds(measured) == set(Kind) - {Kind.CACHED_PREFIX}
    assert [omission for omission in measured.omitted if reason in omission]
    source = fit(measured).profile.source
    assert "Prefill behind a cached prefix: from prompts without one." in source.extrapolated


@pytest.mark.parametrize("slowness", [10.0, 40.0])
def test_a_slow_engine_is_measured_for_as_long_as_was_promised_and_not_much_longer(slowness: float) -> None:
    engine = VirtualEngine(slowness=slowness)
    measured, _ = measure(engine, FULL)
    assert engine.now_s - 100.0 < 1.5 * FULL.limit_s, "one trial a group may be under way when its time is over"
    assert [omission for omission in measured.omitted if "out of time" in omission]
    assert len(measured.points) >= 3


def test_an_engine_too_slow_to_say_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="too slow to be profiled in 50 s"):
        measure(VirtualEngine(slowness=10_000))


def test_a_trial_that_hangs_is_given_up() -> None:
    engine = VirtualEngine(slowness=1e-4)
    engine.hangs_at_batch = 16
    measured, _ = measure(engine, replace(QUICK, limit_s=0.6))
    assert len(measured.points) > 3
    assert any("batch of 16: out of time" in omission for omission in measured.omitted)


@pytest.mark.parametrize("after", [-1, 5])
def test_an_engine_with_other_calls_is_refused_also_later(after: int) -> None:
    engine = VirtualEngine()
    engine.busy_after = after
    with pytest.raises(ValueError, match="busy"):
        measure(engine)


def test_the_file_says_where_it_comes_from_and_can_be_used(tmp_path: Path) -> None:
    measured, _ = measure(VirtualEngine())
    fitted = fit(measured, circumstances=replace(CIRCUMSTANCES, accelerator="H100"))
    path = tmp_path / "mine.toml"
    path.write_text(fitted.profile.toml(), encoding="utf-8")
    profile = load_profile(str(path))
    assert profile == fitted.profile
    assert profile.kv.tokens == 100_000
    source = profile.source
    assert (source.engine, source.model) == ("vllm host:1, system fingerprint virtual", "m")
    assert source.accelerator == "H100"
    for part in ("plait profile 1.2.3 on 2026-01-02", f"{measured.samples} measurements", "batches of 1 to 16"):
        assert part in source.provenance
    assert "more than 2048 new tokens" in source.extrapolated


def test_what_the_engine_does_not_tell_is_said_to_be_assumed() -> None:
    limits = Limits(context_tokens=8_192)
    measured, _ = measure(VirtualEngine(), limits=limits)
    assumed = fit(measured, limits).profile
    assert assumed.kv.tokens == 8_192
    assert "KV cache: not reported" in assumed.source.extrapolated
    assert "Token budget: not reported" in assumed.source.extrapolated
    told = fit(measured, replace(limits, kv_tokens=50_000), replace(CIRCUMSTANCES, told=("KV cache",))).profile
    assert told.kv.tokens == 50_000
    assert "KV cache: as told on the command line" in told.source.extrapolated


def test_the_report_has_a_line_for_each_point_and_a_summary() -> None:
    measured, _ = measure(VirtualEngine())
    fitted = fit(measured)
    lines = fitted.report().splitlines()
    assert len(lines) == 1 + len(measured.points) + 4
    assert lines[0].split() == ["measured", "new", "context", "batch", "ms", "fitted", "error"]
    assert lines[1].split()[:4] == ["prefill", "1", "0", "1"]
    assert f"{len(measured.points)} points, relative error" in lines[-4]
    assert "pivot forward size" in lines[-3]
    assert lines[-2] == "iterations planned ahead: cannot be told"
    assert "outside its iterations a request takes 4.0 ms" in lines[-1]
