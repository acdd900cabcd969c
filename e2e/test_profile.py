"""`plait profile` on a running engine gives its cost model back, in a file that another engine runs with.

The accuracy is tested in virtual time (`tests/lab/profiling/test_profiler.py`): other processes disturb it here.
So the figures have to be there, and another engine has to run with them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from math import isfinite
from pathlib import Path

import httpx
import pytest

from e2e.server_process import NO_TLS, PLAIT, Server
from e2e.servers import Launcher
from plait.backends.profiles import load_profile
from tests.waiting import WITHIN_S

OPTIONS = ("--max-context-tokens", "16384")
STEPS = """
ahead = 1
[source]
engine = "of this test"
model = "its decodes are CUDA graphs, and its prompts are none"
accelerator = "none"
provenance = "made up"
[forward]
knots = [[1, 7.0], [4, 7.5], [5, 8.5], [8, 8.5], [9, 10.0], [16, 10.0]]
slope_ms = 0.2
[with_prompts]
knots = [[1, 29.0], [900, 29.0]]
slope_ms = 0.032
[attention]
context_ms = 5e-4
[kv]
tokens = 198_516
"""

GRID = ([(1, 100)], [(1, 2_000)] * 8, [(300, 0)], [(1_800, 0)], [(700, 6_000)], [(512, 0), *[(1, 1_000)] * 6])
"""Iterations between the points that are measured."""


def profile(engine: Server, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(PLAIT), "profile", "--engine", engine.url, "--quick", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * WITHIN_S, check=False)


def are_times(times: Iterable[float]) -> bool:
    return all(isfinite(one) and one > 0 for one in times)


def test_an_engines_cost_model_is_found_by_measuring_it(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(STEPS, encoding="utf-8")
    engine = launch.engine("profiled", time_scale=1, options=[*OPTIONS, "--profile", str(own)])
    engine.start()
    engine.wait_until_ready()
    out = tmp_path / "fitted.toml"
    done = profile(engine, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "round 3: decode" in done.stderr
    fitted = load_profile(str(out))
    assert fitted.fit is not None
    assert fitted.fit.points > 20
    assert f"relative error {fitted.fit.mean_relative_error:.1%} in the mean" in done.stderr
    assert fitted.kv.tokens == pytest.approx(198_516, abs=16)
    assert fitted.source.engine.startswith("embedded profiled, ")
    assert "emulated" in fitted.source.engine
    assert "plait profile" in fitted.source.provenance

    # On a busy machine it cannot be told whether prompts have a curve of their own, nor how far is planned ahead.
    assert "iterations planned ahead: " in done.stderr
    assert fitted.ahead in {None, 1}, done.stderr

    model = fitted.cost_model()
    assert are_times(model.iteration_time_s(work) for work in map(tuple, GRID)), done.stderr

    emulated = launch.engine("emulated", options=["--profile", str(out)])
    emulated.start()
    emulated.wait_until_ready()
    completion = emulated.post("/v1/completions", json={"model": "demo", "prompt": "Hello", "max_tokens": 3})
    assert completion.json()["usage"]["completion_tokens"] == 3


def test_the_link_of_host_memory_is_found_too(launch: Launcher, tmp_path: Path) -> None:
    tier = ("--kv-tokens", "16000", "--max-context-tokens", "4096", "--host-kv-tokens", "64000", "--host-gbps", "10")
    engine = launch.engine("tiered", options=[*tier, "--profile", "a6000-mistral-7b"])
    engine.start()
    engine.wait_until_ready()
    out = tmp_path / "fitted.toml"
    done = profile(engine, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "loads: 3 from host" in done.stderr
    assert "link from host: " in done.stderr
    [link] = load_profile(str(out)).kv.links
    assert link.tier == "host"
    assert are_times((link.gbytes_per_s, link.latency_ms)), link


def test_a_busy_engine_and_one_that_is_not_there_are_refused(launch: Launcher) -> None:
    engine = launch.engine("busy", time_scale=1)
    absent = profile(engine)
    assert absent.returncode == 2
    assert absent.stderr.startswith(f"plait: engine {engine.url} does not answer")

    engine.start()
    engine.wait_until_ready()
    long = {"model": "demo", "prompt": "Hello", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{engine.url}/v1/completions", json=long, trust_env=False, verify=NO_TLS, timeout=WITHIN_S
    ) as call:
        lines = call.iter_lines()  # kept: an iterator that is let go closes the stream
        next(lines)
        busy = profile(engine)
    assert busy.returncode == 2
    assert busy.stderr.endswith("is busy with 1 calls that are not ours; stop its load and try again\n")
