"""Plait's wheel in an engine's environment, beside distributions and files of the user's of its folders' names."""

from __future__ import annotations

from pathlib import Path

from e2e.installed import clashing_folder, copied_environment
from e2e.real_engines.engine import MODEL, EngineKind, started


def test_the_adapter_runs_beside_them(kind: EngineKind, python: Path, model: Path, tmp_path: Path) -> None:
    copied = copied_environment(python, tmp_path / "environment")
    engine = kind.plait("installed", copied, model, clashing_folder(tmp_path))
    with started([engine]):
        answer = engine.post("/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 2})
        assert answer.status_code == 200
        assert engine.cache_state().scheduler.policy == "slo"
