"""Plait's wheel in vLLM's environment, beside distributions and files of the user's that have its folders' names."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from e2e.installed import clashing_folder, copied_environment
from e2e.vllm.engines import MODEL, plait_engine


def test_the_adapter_runs_beside_them(python: Path, model: Path, tmp_path: Path) -> None:
    copied = copied_environment(python, tmp_path / "environment")
    engine = plait_engine("installed", copied, model, clashing_folder(tmp_path))
    with ExitStack() as running:
        running.callback(engine.stop)
        engine.start()
        engine.wait_until_ready()
        answer = engine.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 2})
        assert answer.status_code == 200
        assert engine.cache_state().scheduler.policy == "slo"
