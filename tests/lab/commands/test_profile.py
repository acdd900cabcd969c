"""`plait profile` on the command line: what it writes where, and what it refuses before and after measuring."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from plait.backends.profiles import load_profile
from plait.gateway.cli import main
from plait.lab.commands import profile
from plait.lab.profiling.engine_probe import EngineIdentity
from plait.lab.profiling.profile_fit import Point
from plait.lab.profiling.profile_plan import FULL, QUICK, Effort, Kind, Limits, chunks, plan
from plait.lab.profiling.profiler import Measured
from plait.lab.profiling.tier_loads import Loaded
from plait.policy.costs.cost_model import CostModel, PiecewiseLinear

LIMITS = Limits(16_384, 2048, 50_000)
MODEL = load_profile("a6000-mistral-7b").cost_model()
STEPS = replace(MODEL, with_prompts=PiecewiseLinear(((1, 0.058), (900, 0.058)), 3.2e-5))
"""Decodes are CUDA graphs, and prompts are none."""


class Probe:
    """An engine that is there."""

    def __init__(self, url: str, *, model: str | None, api_key: str | None) -> None:
        self.arguments = (url, model, api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def identify(self) -> EngineIdentity:
        url, model, api_key = self.arguments
        return EngineIdentity(f"vllm at {url} with {api_key}", model or "first", LIMITS)

    async def loaded(self) -> dict[str, Loaded]:
        return {}


class Profiler:
    """Measures exactly what a cost model says."""

    model: CostModel = MODEL
    efforts: Sequence[Effort] = ()

    def __init__(
        self, _engine: Probe, _limits: Limits, effort: Effort, _rng: object, progress: Callable[[str], None]
    ) -> None:
        type(self).efforts = (*self.efforts, effort)
        progress("round 1")

    async def measure(self) -> Measured:
        points = []
        for trial in (trial for trials in plan(LIMITS, QUICK).values() for trial in trials):
            call = (trial.new_tokens, trial.context_tokens)
            iterations = chunks(*call, 2048) if trial.kind is not Kind.DECODE else ((call,) * trial.batch,)
            prompt_tokens = 0 if trial.kind is Kind.DECODE else sum(call)
            points.append(
                Point(trial.kind, iterations, sum(map(self.model.iteration_time_s, iterations)), prompt_tokens)
            )
        return Measured(points, len(points), None)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "EngineProbe", Probe)
    monkeypatch.setattr(profile, "Profiler", Profiler)
    monkeypatch.setattr(Profiler, "efforts", ())


def test_the_profile_goes_to_the_file_and_the_report_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.toml"
    command = ["profile", "--engine", "http://e:1", "--model", "m", "--api-key", "k", "--quick", "--out", str(out)]
    told = ["--kv-tokens", "123456", "--max-batch-tokens", "512", "--kv-bytes-per-token", "1000"]
    assert main([*command, "--accelerator", "A6000", *told]) == 0
    written = load_profile(str(out))
    assert written.source.engine == "vllm at http://e:1 with k"
    assert (written.source.model, written.source.accelerator) == ("m", "A6000")
    assert re.search(r"^plait profile \d+\.\d+\S* on \d{4}-\d\d-\d\d: ", written.source.provenance)
    assert (written.kv.tokens, written.kv.bytes_per_token, written.kv.links) == (123_456, 1_000, [])
    assert "KV cache: as told on the command line. Token budget: as told" in written.source.extrapolated
    assert written.cost_model().prefill_time_s(1_000) == pytest.approx(MODEL.prefill_time_s(1_000), rel=0.02)
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "profiling m on vllm" in streams.err
    assert "round 1" in streams.err
    assert "relative error" in streams.err
    assert f"plait engine --profile {out}" in streams.err
    assert Profiler.efforts == (QUICK,)


def test_the_file_tells_iterations_with_prompts_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Profiler, "model", STEPS)
    out = tmp_path / "steps.toml"
    assert main(["profile", "--engine", "http://e:1", "--quick", "--out", str(out)]) == 0
    written = load_profile(str(out))
    assert written.with_prompts is not None
    assert written.with_prompts.knots[0][1] > 1.5 * written.forward.knots[0][1]
    works = ([(1, 100)], [(300, 0)], [(700, 6_000)])
    found, own = written.cost_model(), STEPS
    assert [found.iteration_time_s(work) for work in works] == pytest.approx(
        [own.iteration_time_s(work) for work in works], rel=0.02
    )


def test_without_a_file_it_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--engine", "http://e:1"]) == 0
    piped = tmp_path / "piped.toml"
    piped.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_profile(str(piped)).source.model == "first"
    assert Profiler.efforts == (FULL,)


@pytest.mark.parametrize("name", ["mine.txt", "mine", "missing/mine.toml"])
def test_a_file_that_could_not_be_used_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["profile", "--engine", "http://e:1", "--out", str(tmp_path / name)]) == 2
    assert "--out has to be a .toml file in a folder that exists" in capsys.readouterr().err
    assert Profiler.efforts == ()


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.toml").mkdir()
    assert main(["profile", "--engine", "http://e:1", "--out", str(tmp_path / "folder.toml")]) == 2
    assert capsys.readouterr().err.endswith("folder.toml: Is a directory\n")


def test_an_engine_that_cannot_be_profiled_is_a_message_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def busy(_: Profiler) -> Measured:
        raise ValueError("engine http://e:1 is busy")

    monkeypatch.setattr(Profiler, "measure", busy)
    assert main(["profile", "--engine", "http://e:1"]) == 2
    streams = capsys.readouterr()
    assert streams.err.endswith("plait: engine http://e:1 is busy\n")
    assert streams.out == ""


def test_the_engine_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["profile"])
    assert "--engine" in capsys.readouterr().err


def test_without_scipy_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profile, "find_spec", lambda _: None)
    assert main(["profile", "--engine", "http://127.0.0.1:9"]) == 2
    assert "pip install 'plait[profile]'" in capsys.readouterr().err
