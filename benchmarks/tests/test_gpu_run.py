from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path

from benchmarks.gpu.calls import Served, quantile
from benchmarks.gpu.engines import Engine
from benchmarks.gpu.gateways import Settings
from benchmarks.gpu.objectives import RATIOS, Plan, Promise, due_calls, promised, rows
from benchmarks.gpu.section import Figures, Fleet, Section, run_section, write
from benchmarks.gpu_run import SECTIONS
from plait.lab.profiling.timed_stream import TimedStream

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


def test_promises_are_the_first_section() -> None:
    assert next(iter(SECTIONS)) == "objectives"


def test_each_tpot_is_promised_with_each_ttft() -> None:
    promises = promised(Plan(1000, tpots_s=(0.027, 0.05)), 0.03)
    assert [(round(one.ttft_s, 3), one.tpot_s) for one in promises] == [
        *((0.12, 0.027), (0.12, 0.05)),
        *((0.09, 0.027), (0.09, 0.05)),
    ]
    assert promises[0].name == "TTFT x 4 (120 ms), TPOT 27 ms"
    assert promises[0].headers == {"plait-slo-ttft-ms": "120", "plait-slo-tpot-ms": "27.0"}


def test_arms_have_the_same_arrivals_and_prompts_of_their_own() -> None:
    plan, promise = Plan(1000, (0.05,), short_tokens=50), Promise("", 0.1, 0.05)
    first, second = (due_calls(plan, 0.1, 5.0, promise, seed) for seed in ("arm 0", "arm 1"))
    assert [(one.at_s, len(one.prompt)) for one in first] == [(one.at_s, len(one.prompt)) for one in second]
    assert len(first) > 50
    assert not {tuple(one.prompt) for one in first} & {tuple(one.prompt) for one in second}


def test_a_promise_is_kept_if_both_times_are() -> None:
    served = [Served(TimedStream(0.0, [(first_s, 1), (first_s + 0.05, 2)]), "A", None) for first_s in (0.1, 0.3)]
    assert Promise("", 0.2, 0.06).kept(served) == 1
    assert Promise("", 0.2, 0.04).kept(served) == 0


def test_a_row_of_a_promise_is_there_before_its_arm() -> None:
    """The stock engine is judged by each, by all its runs so far."""
    promises = [Promise("a", 1.0, 1.0), Promise("b", 2.0, 1.0)]
    stock = {"system": "stock", "kept": {"a": 0.2, "b": 0.4}, **dict.fromkeys(RATIOS, 2.0)}
    ours = {"system": "slo", "kept": {"a": 0.9}, **dict.fromkeys(RATIOS, 3.0)}
    assert rows(promises, [stock, ours]) == {
        "a": {"stock kept": 0.2, "slo kept": 0.9, "slo / stock": dict.fromkeys(RATIOS, 1.5)},
        "b": {"stock kept": 0.4},
    }
