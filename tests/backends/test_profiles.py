"""The shipped cost profiles at points that were published or worked out by hand, and what is said of a bad file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from plait.backends.profiles import Fit, Forward, Kv, Link, Pivot, load_profile, shipped_profiles

PUBLISHED = ("a100-llama-70b-tp2", "a100-mistral-7b", "a100-opt-13b", "a6000-mistral-7b", "h100-llama-70b-tp2")
MEASURED = ("h200-llama-8b",)
NAMES = PUBLISHED + MEASURED

GOOD = """
efficiency = 0.5
[source]
engine = "e"
model = "m"
accelerator = "a"
provenance = "p"
[forward]
knots = [[1, 10.0]]
slope_ms = 0.1
[attention]
context_ms = 0.001
[kv]
tokens = 1000
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_all_are_shipped() -> None:
    assert tuple(shipped_profiles()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_they_say_where_they_come_from(name: str) -> None:
    source = load_profile(name).source
    assert ("Preble" if name in PUBLISHED else "python -m benchmarks forward_passes on 20") in source.provenance
    assert source.extrapolated


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_one_has_its_errors(name: str) -> None:
    fit = load_profile(name).fit
    assert fit is not None
    assert fit.points > 100
    assert fit.mean_relative_error < 0.05
    assert fit.max_relative_error < 0.15


@pytest.mark.parametrize("name", NAMES)
def test_more_tokens_never_take_less_time(name: str) -> None:
    model = load_profile(name).cost_model()
    sizes = [*range(1, 600), *range(600, 40_000, 777)]
    for context in (0, 100, 1_024, 30_000):
        times = [model.prefill_time_s(size, context) for size in sizes]
        assert times == sorted(times)
    for new in (1, 64, 256, 2_048):
        times = [model.prefill_time_s(new, context) for context in sizes]
        assert times == sorted(times)
    assert 0 < model.decode_time_s(1) < model.decode_time_s(2) < model.decode_time_s(2, 50_000)


# Milliseconds as published: the forward pass at n new tokens, attention at the whole sequence, then the rest.
@pytest.mark.parametrize(
    ("name", "new", "context", "expected_ms"),
    [
        ("a6000-mistral-7b", 384, 0, (0.10842571 * 384 + 4.2098 + 0.32) / 0.9),
        ("a6000-mistral-7b", 500, 1_500, (0.10842571 * 500 + 4.2098 + 1.86e-4 * 2_000 + 0.159) / 0.9),
        # 1.86e-4 x 10,000 of attention, then what is added beyond 2^20 = new x sequence
        ("a6000-mistral-7b", 2_000, 8_000, (216.85142 + 4.2098 + 1.86 + 0.159 + 2.26 + 17.5 + 43.8) / 0.9),
        ("a6000-mistral-7b", 1, 0, (22 + 0.32) / 0.9),
        ("a100-mistral-7b", 1, 0, (8.96 + 0.12) / 0.85),
        ("a100-mistral-7b", 64, 0, (10.5 + 0.12) / 0.85),
        ("a100-mistral-7b", 1_000, 0, (0.05031337 * 1_000 + 5.506 + 7e-5 * 1_000 + 0.06) / 0.85),
        ("h100-llama-70b-tp2", 1_000, 0, 18.667 + 79.88 + 2.685 + 0.7444),
        ("h100-llama-70b-tp2", 500, 1_500, 18.667 + 0.07988 * 500 + 2.685e-3 * 2_000 + 7.444e-7 * 1e6),
        ("a100-llama-70b-tp2", 1_000, 1_000, 28.931 + 182.23 + 4.004e-3 * 2_000 + 2.551e-6 * 2e6),
    ],
)
def test_published_points(name: str, new: int, context: int, expected_ms: float) -> None:
    model = load_profile(name).cost_model()
    assert model.prefill_time_s(new, context) * 1e3 == pytest.approx(expected_ms, rel=1e-4)


# Milliseconds as measured: medians of `benchmarks/timing/h200-llama-8b.json`.
@pytest.mark.parametrize(
    ("work", "measured_ms"),
    [
        ([(1024, 0)], 26.97),
        ([(2048, 32_768)], 115.0),
        ([(1, 8192)], 5.057),
        ([(1, 2048)] * 64, 9.338),
        ([(512, 8192), *[(1, 1024)] * 16], 20.84),  # held out
    ],
)
def test_measured_points(work: list[tuple[int, int]], measured_ms: float) -> None:
    model = load_profile("h200-llama-8b").cost_model()
    assert model.iteration_time_s(work) * 1e3 == pytest.approx(measured_ms, rel=0.06)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("a6000-mistral-7b", 198_516),
        ("a100-mistral-7b", 426_000),
        ("h200-llama-8b", (150_109_880_320 * 9 // 10 - 16_059_990_016 - 2_281_701_376) // 131_072),
    ],
)
def test_kv_capacity(name: str, tokens: int) -> None:
    assert load_profile(name).kv.tokens == tokens


def test_ones_own_file_by_its_path(write: Callable[[str], str]) -> None:
    profile = load_profile(write(GOOD))
    assert profile.cost_model().prefill_time_s(101) == pytest.approx((10 + 100 * 0.1 + 0.101) / 0.5 / 1e3)
    assert profile.kv.tokens == 1_000


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again(name: str, write: Callable[[str], str]) -> None:
    profile = load_profile(name)
    assert load_profile(write(profile.toml())) == profile


def test_so_is_what_only_a_fitted_profile_has_and_any_text(write: Callable[[str], str]) -> None:
    profile = load_profile(write(GOOD))
    text = 'quoted "text", a \\ b, tab\t, line\nline, \x7f\x00, \u00b5s \U0001f600'
    profile = structs.replace(
        profile,
        source=structs.replace(profile.source, engine=text),
        kv=Kv(1_000, 65_536, [Link("host", 24.8713, 0.512), Link("disk", 5.0)]),
        pivot=Pivot(184, 5.149),
        fit=Fit(26, 0.0233794, 0.138016),
        with_prompts=Forward([(8, 29.0), (900, 29.0)], 0.032),
        ahead=1,
    )
    assert load_profile(write(profile.toml())) == profile


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_profile_has_a_pivot(name: str) -> None:
    pivot = load_profile(name).cost_model().pivot()
    assert pivot is not None
    assert 100 < pivot.tokens < 4_096
    assert 0.01 < pivot.time_s < 0.5


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[kv]\ntokens = 1000", "", "kv"),
        ("tokens = 1000", "tokens = 0", "$.kv.tokens"),
        ("tokens = 1000", "tokens = 10.5", "$.kv.tokens"),
        ("slope_ms = 0.1", "", "slope_ms"),
        ("slope_ms = 0.1", "slope_ms = -0.1", "$.forward.slope_ms"),
        ("slope_ms = 0.1", "slope_ms = nan", "$.forward.slope_ms"),
        ("slope_ms = 0.1", "slope = 0.1\nslope_ms = 0.1", "slope"),
        ("[[1, 10.0]]", "[[1]]", "$.forward.knots"),
        ("[[1, 10.0]]", "[]", "$.forward"),
        ("[[1, 10.0]]", "[[2, 10.0], [1, 11.0]]", "$.forward"),
        ("[[1, 10.0]]", "[[1, 10.0], [2, 9.0]]", "$.forward"),
        ("context_ms = 0.001", "context_ms = -1", "$.attention.context_ms"),
        ("context_ms = 0.001", "context_ms = inf", "$.attention.context_ms"),
        ("efficiency = 0.5", "efficiency = 0", "$.efficiency"),
        ("efficiency = 0.5", "ahead = 2", "$.ahead"),
        ("efficiency = 0.5", 'efficiency = "half"', "$.efficiency"),
        ("efficiency = 0.5", "efficiency = ", "line 2"),
        ("[kv]", "[pivot]\ntokens = 0\ntime_ms = 1.0\n[kv]", "$.pivot.tokens"),
        ("[kv]", "[fit]\npoints = 3\nmean_relative_error = 0.1\n[kv]", "max_relative_error"),
    ],
)
def test_an_error_names_the_file_and_the_key(write: Callable[[str], str], old: str, new: str, named: str) -> None:
    assert old in GOOD
    path = write(GOOD.replace(old, new))
    with pytest.raises(ValueError, match="cost profile ") as caught:
        load_profile(path)
    assert path in str(caught.value)
    assert named in str(caught.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^cost profile /no/such\.toml: .*No such file"):
        load_profile("/no/such.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary\.toml: .*utf-8"):
        load_profile(str(tmp_path / "binary.toml"))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r'no cost profile "a6000"; give one of a100-llama-70b-tp2, .* or the path'):
        load_profile("a6000")
