from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path

from benchmarks.gpu.calls import Served, quantile
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.gateways import Settings
from benchmarks.gpu.section import Figures, Fleet, Section, run_section, write
from plait.backends.profiling.timed_stream import TimedStream

FLEET = Fleet([Engine("A", 1), Engine("B", 2)], Engine("S", 3, is_stock=True), Path(), Path())


async def found_all(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 1.0


async def takes_too_long(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 0.5
    await asyncio.sleep(60)


async def fails(_fleet: Fleet, _seconds: float, figures: Figures) -> None:
    figures["share"] = 0.25
    async with asyncio.TaskGroup() as group:
        group.create_task(refused())


async def refused() -> None:
    raise ValueError("status 500")


async def test_a_section_leaves_its_figures(tmp_path: Path) -> None:
    outcome = await run_section(Section("exactness", 1, "all", found_all), FLEET, 1, {"accelerator": "CPU"})
    write(outcome, tmp_path)
    found = json.loads((tmp_path / "exactness.json").read_text())
    assert (found["figures"], found["expected"], found["problem"]) == ({"share": 1.0}, "all", "")


async def test_what_was_found_before_the_cut_stays() -> None:
    outcome = await run_section(Section("exactness", 1, "", takes_too_long), FLEET, 0.01, {})
    assert (outcome.figures, outcome.problem) == ({"share": 0.5}, "cut off after 0 s")


async def test_a_failure_is_part_of_the_outcome() -> None:
    outcome = await run_section(Section("exactness", 1, "", fails), FLEET, 1, {})
    assert (outcome.figures, outcome.problem) == ({"share": 0.25}, "ValueError: status 500")


def test_a_gateway_with_defaults_is_told_of_its_engines_only(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    assert Settings(FLEET.engines).arguments(file) == ["--config", str(file)]
    assert tomllib.loads(file.read_text()).keys() == {"engines"}


def test_a_gateway_has_the_policy_the_tokenizer_and_the_profile_that_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    settings = Settings([FLEET.stock], "round_robin", Path("/model"), "h200-llama-8b")
    assert settings.arguments(file) == ["--config", str(file)]
    assert tomllib.loads(file.read_text()) == {
        "engines": [{"name": "S", "url": "http://127.0.0.1:3"}],
        "placement": {"policy": "round_robin"},
        "models": [{"name": "shape", "tokenizer": "/model", "profile": "h200-llama-8b"}],
    }


def test_the_time_of_a_token_is_that_after_the_first() -> None:
    stream = TimedStream(10.0, [(10.5, 1), (10.7, 2), (11.5, 6)])
    served = Served(stream, "A", 64)
    assert (served.ttft_s, served.tpot_s, served.cached_tokens) == (0.5, 0.2, 0)
    assert Served(TimedStream(0.0, [(1.0, 1)]), "A", None).tpot_s == 0.0


def test_quantiles_of_few_values() -> None:
    assert (quantile([], 0.5), quantile([3.0], 0.99), quantile([4.0, 1.0, 3.0, 2.0], 0.5)) == (0.0, 3.0, 3.0)
