"""The links of lower tiers, by loads of an embedded engine in virtual time and by made-up ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from plait.backends.profiles import Link, load_profile
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.lower_tiers import TierSettings
from plait.lab.profiling import tier_loads
from plait.lab.profiling.engine_probe import EngineIdentity
from plait.lab.profiling.fitted_profile import Circumstances, FittedProfile, fit_profile
from plait.lab.profiling.profile_fit import Point
from plait.lab.profiling.profile_plan import QUICK, Kind, Limits, plan
from plait.lab.profiling.profiler import Measured
from plait.lab.profiling.tier_loads import LinkProfiler, Loaded, fit_link, load_lengths
from plait.lab.profiling.timed_stream import TimedStream
from plait.policy.costs.tier_link import BYTES_PER_TOKEN, TierLink
from tests.lab.profiling.embedded_engine import EmbeddedEngine

LIMITS = Limits(context_tokens=4096, budget_tokens=2048, kv_tokens=32_000)
COSTS = load_profile("a6000-mistral-7b").cost_model()
HOST = TierLink.of("host", BYTES_PER_TOKEN, 10.0, 0.002)
DISK = TierLink.of("disk", BYTES_PER_TOKEN, 4.0, 0.003)
TRIALS = [trial for kind, trials in plan(LIMITS, QUICK).items() if kind is not Kind.CHUNKED for trial in trials]
WORKS = [(trial.kind, ((trial.new_tokens, trial.context_tokens),) * trial.batch) for trial in TRIALS]
POINTS = [
    Point(kind, (work,), COSTS.iteration_time_s(work), 0 if kind is Kind.DECODE else sum(work[0]))
    for kind, work in WORKS
]
MEASURED = Measured(POINTS, len(POINTS), None)


class TieredEngine(EmbeddedEngine):
    """An embedded engine with lower tiers. Its loads show up `late_reports` reports late."""

    def __init__(self, *lower: tuple[TierLink, int]) -> None:
        tiers = tuple(TierSettings(link, tokens) for link, tokens in lower)
        super().__init__(EngineSettings(name="e", model="m", kv_tokens=32_000, lower=tiers), COSTS)
        self.prompts: list[Sequence[int]] = []
        self.out_of_time_at = 1_000
        self.late_reports = 0
        self._told: dict[str, Loaded] = {}
        self._unread = 0

    async def complete(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> list[TimedStream]:
        if len(self.prompts) == self.out_of_time_at:
            raise TimeoutError
        self.prompts += prompts
        self._unread = self.late_reports
        return await super().complete(prompts, output_tokens)

    async def loaded(self) -> dict[str, Loaded]:
        if not self._unread:
            tiers = self.engine.cache_state().tiers
            self._told = {tier.tier: Loaded(tier.loaded_tokens, tier.loading_s) for tier in tiers}
        self._unread = max(0, self._unread - 1)
        return self._told


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loads, "REPORTED_WITHIN_S", 0.001)


def measure(engine: TieredEngine) -> tuple[dict[str, list[Loaded]], list[str]]:
    lines: list[str] = []
    return asyncio.run(LinkProfiler(engine, LIMITS, random.Random(3), lines.append).measure(limit_s=600.0)), lines


def fit(loads: dict[str, list[Loaded]], bytes_per_token: int | None = None) -> FittedProfile:
    circumstances = Circumstances("2026-01-02", "1.2.3", kv_bytes_per_token=bytes_per_token)
    return fit_profile(MEASURED, EngineIdentity("vllm host:1", "m", LIMITS), circumstances, loads)


def check_link(link: Link, real: TierLink, bytes_per_token: int = BYTES_PER_TOKEN) -> None:
    assert link.tier == real.tier
    assert link.gbytes_per_s == pytest.approx(bytes_per_token / real.token_s / 1e9, rel=0.05)
    assert link.latency_ms == pytest.approx(real.latency_s * 1e3, rel=0.05)


@pytest.mark.parametrize("late_reports", [0, 3])
def test_an_engines_own_link_comes_back_in_a_file_that_can_be_read(tmp_path: Path, late_reports: int) -> None:
    engine = TieredEngine((HOST, 100_000))
    engine.late_reports = late_reports
    loads, lines = measure(engine)
    assert [line.split(" in ")[0] for line in lines] == ["loads: 3 from host"]
    fitted = fit(loads)
    assert "link from host: 10 GB/s, 2 ms for each load" in fitted.report().splitlines()
    path = tmp_path / "mine.toml"
    path.write_text(fitted.profile.toml(), encoding="utf-8")
    profile = load_profile(str(path))
    assert profile == fitted.profile
    assert profile.kv.bytes_per_token == BYTES_PER_TOKEN
    [link] = profile.kv.links
    check_link(link, HOST)
    [costs] = profile.cost_model().links
    assert costs.load_s(3_000) == pytest.approx(HOST.load_s(3_000), rel=0.05)
    assert "loads of 1008 to 4080 tokens from host." in profile.source.provenance
    assert "Bytes of a token: assumed" in profile.source.extrapolated


def test_each_tier_has_its_link() -> None:
    loads, _ = measure(TieredEngine((HOST, 33_000), (DISK, 100_000)))
    assert list(loads) == ["host"]
    loads, _ = measure(TieredEngine((HOST, 4_000), (DISK, 100_000)))
    [link] = (link for link in fit(loads).profile.kv.links if link.tier == "disk")
    check_link(link, DISK)


def test_bytes_that_the_user_tells_change_the_bandwidth_and_no_time() -> None:
    loads, _ = measure(TieredEngine((HOST, 100_000)))
    profile = fit(loads, 65_536).profile
    assert profile.kv.bytes_per_token == 65_536
    check_link(profile.kv.links[0], HOST, 65_536)
    assert profile.cost_model().links[0].token_s == pytest.approx(HOST.token_s, rel=0.05)
    assert "assumed" not in profile.source.extrapolated.replace("are assumed to take one", "")


def test_what_is_sent_fits_the_engine_and_pushes_the_first_prompts_off() -> None:
    engine = TieredEngine((HOST, 100_000))
    measure(engine)
    assert all(len(prompt) + 2 <= LIMITS.context_tokens for prompt in engine.prompts)
    first, pushing, again = engine.prompts[:3], engine.prompts[3:-3], engine.prompts[-3:]
    assert first == again
    assert sum(map(len, pushing)) == LIMITS.kv_tokens


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        (Limits(200_000, None, 160_000), [10_000, 20_000, 40_000]),
        (Limits(4_098, None, 160_000), [1_024, 2_048, 4_096]),
        (Limits(1_000, None, 1_000), [62, 125, 250]),
        (Limits(9, None, 9), [1, 2]),
    ],
)
def test_the_lengths_differ_also_where_the_context_is_short(limits: Limits, lengths: list[int]) -> None:
    assert load_lengths(limits) == lengths


@pytest.mark.parametrize("lower", [(), ((HOST, 100_000),)])
def test_without_loads_the_profile_is_as_before(lower: tuple[tuple[TierLink, int], ...]) -> None:
    engine = TieredEngine(*((TierLink(link.tier, 1.0), tokens) for link, tokens in lower))  # computing is sooner done
    loads, lines = measure(engine)
    assert loads == {}
    assert bool(engine.prompts) == bool(lines) == bool(lower)
    fitted = fit(loads)
    circumstances = Circumstances("2026-01-02", "1.2.3")
    before = fit_profile(MEASURED, EngineIdentity("vllm host:1", "m", LIMITS), circumstances)
    assert fitted.profile.toml() == before.profile.toml()
    assert fitted.report() == before.report()
    assert "links = []" in fitted.profile.toml()


def test_what_came_before_the_limit_counts() -> None:
    engine = TieredEngine((HOST, 100_000))
    measure(engine)
    slow = TieredEngine((HOST, 100_000))
    slow.out_of_time_at = len(engine.prompts) - 1
    loads, lines = measure(slow)
    assert len(loads["host"]) == 2
    assert lines[0].endswith(": out of time")


@pytest.mark.parametrize(
    ("loads", "link"),
    [
        ([], None),
        ([Loaded(100, 0.2), Loaded(100, 0.3)], None),
        ([Loaded(100, 0.2), Loaded(200, 0.2)], None),
        ([Loaded(100, 0.3), Loaded(200, 0.2)], None),
        ([Loaded(100, 0.2), Loaded(200, 0.3)], TierLink("t", 0.001, 0.1)),
        ([Loaded(100, 0.2), Loaded(200, 0.5)], TierLink("t", 0.0024, 0.0)),
    ],
)
def test_neither_latency_nor_time_of_a_token_is_negative(loads: list[Loaded], link: TierLink | None) -> None:
    found = fit_link("t", loads)
    assert (found is None) == (link is None)
    if found is not None and link is not None:
        assert (found.token_s, found.latency_s) == pytest.approx((link.token_s, link.latency_s))
