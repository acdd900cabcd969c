"""The mixed prompts: shares, objectives and arrivals as they are stated."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks import mixed_prompts
from benchmarks.mixed_prompts import (
    GROUP_TOKENS,
    LONG_FILE,
    MAX_OUTPUT_TOKENS,
    READING_S,
    SHORT_FILE,
    TPOT_CHOICES,
    Lengths,
    Mix,
    MixedPrompts,
    cap,
    statistics,
)
from plait.policy.costs.cost_model import CostModel, LongAttention, PiecewiseLinear

KV_TOKENS = 8_000
COSTS = CostModel(PiecewiseLinear(((1, 0.01),), 0.0001), 0.0, 0.0, 0.0, LongAttention())


@pytest.fixture
def prompts(tmp_path: Path) -> MixedPrompts:
    long = [{"timestamp": 0, "input_length": tokens, "output_length": 100} for tokens in (3_000, 6_000, 20_000)]
    (tmp_path / LONG_FILE).write_text("".join(json.dumps(record) + "\n" for record in long), encoding="utf-8")
    short = "".join(f"2023-11-16 18:15:46,{tokens},50\n" for tokens in (100, 200, 700))
    (tmp_path / SHORT_FILE).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + short, encoding="utf-8")
    return MixedPrompts(tmp_path, COSTS, KV_TOKENS)


def test_a_prompt_is_cut_to_what_the_cache_holds_beside_its_output() -> None:
    assert cap((20_000, 100), KV_TOKENS) == Lengths(7_900, 100, capped=True)
    assert cap((7_900, 100), KV_TOKENS) == Lengths(7_900, 100)
    assert cap((10, 5_000), KV_TOKENS) == Lengths(10, MAX_OUTPUT_TOKENS)
    assert cap((0, 0), KV_TOKENS) == Lengths(1, 1)


def test_the_share_of_long_prompts_is_exact(prompts: MixedPrompts) -> None:
    calls = prompts.draw(Mix(calls=200, rate_per_s=1.0, seed=3))
    assert sum(call.long_source for call in calls) == 70
    assert all((call.lengths.prompt_tokens >= 3_000) == call.long_source for call in calls)
    figures = statistics(calls)
    assert figures["long_source_share"] == 0.35
    assert figures["capped_calls"] == sum(call.lengths.prompt_tokens == 7_900 for call in calls)


def test_brief_calls_have_short_outputs_and_prompts_that_are_cut(
    prompts: MixedPrompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_prompts, "BRIEF_PROMPT_TOKENS", 6_000)
    brief = prompts.draw(Mix(calls=200, rate_per_s=1.0, seed=3, brief=True))
    assert {call.lengths.output_tokens for call in brief} == {50}
    assert {call.lengths.prompt_tokens for call in brief if call.long_source} == {3_000, 6_000}


def test_arrivals_are_poisson_and_the_rate_only_stretches_them(prompts: MixedPrompts) -> None:
    slow = prompts.draw(Mix(calls=4_000, rate_per_s=0.5, seed=1))
    fast = prompts.draw(Mix(calls=4_000, rate_per_s=2.0, seed=1))
    gaps = [after.arrives_s - before.arrives_s for before, after in pairwise(slow)]
    assert fmean(gaps) == pytest.approx(2.0, rel=0.05)
    assert fmean(gap * gap for gap in gaps) == pytest.approx(2 * 2.0**2, rel=0.1)
    assert [call.lengths for call in slow] == [call.lengths for call in fast]
    assert [call.slo for call in slow] == [call.slo for call in fast]
    assert slow[-1].arrives_s == pytest.approx(4 * fast[-1].arrives_s)


def test_a_ttft_is_its_groups_mean_prefill_time_scaled(prompts: MixedPrompts) -> None:
    assert prompts.group_prefill_s[0] == pytest.approx(fmean(COSTS.prefill_time_s(tokens) for tokens in (100, 200)))
    scales = []
    for call in prompts.draw(Mix(calls=2_000, rate_per_s=1.0, seed=2)):
        assert call.slo.ttft_s is not None
        scales.append(call.slo.ttft_s / prompts.group_prefill_s[call.lengths.prompt_tokens // GROUP_TOKENS])
    assert 0.5 <= min(scales) < 0.51
    assert 1.49 < max(scales) <= 1.5
    assert fmean(scales) == pytest.approx(1.0, abs=0.02)


def test_tpot_objectives_come_from_the_choices_or_the_range(prompts: MixedPrompts) -> None:
    chosen = prompts.draw(Mix(calls=500, rate_per_s=1.0, seed=2, tpot="choice"))
    assert {call.slo.tpot_s for call in chosen} == {READING_S * scale for scale in TPOT_CHOICES}
    ranged = [call.slo.tpot_s or 0.0 for call in prompts.draw(Mix(calls=500, rate_per_s=1.0, seed=2))]
    assert min(ranged) >= READING_S * 0.75
    assert max(ranged) <= READING_S * 1.25


def test_what_an_idle_engine_cannot_do_is_not_feasible(prompts: MixedPrompts) -> None:
    for call in prompts.draw(Mix(calls=300, rate_per_s=1.0, seed=4)):
        assert call.slo.ttft_s is not None
        assert call.feasible == (COSTS.prefill_time_s(call.lengths.prompt_tokens) <= call.slo.ttft_s)


def test_the_same_seed_draws_the_same(prompts: MixedPrompts) -> None:
    assert prompts.draw(Mix(50, 1.0, 7)) == prompts.draw(Mix(50, 1.0, 7))
    assert prompts.draw(Mix(50, 1.0, 7)) != prompts.draw(Mix(50, 1.0, 8))
