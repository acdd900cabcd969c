"""A vLLM that lacks a name is refused, with all that is missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from plait.backends.vllm.compatibility import ATTRIBUTES, UnsupportedVllmError, check_attributes, check_names


def test_the_refusal_lists_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = ModuleType("vllm")
    vllm.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(UnsupportedVllmError, match=r"\(9\.9\); it lacks: json\.a, json\.b\."):
        check_names({"json.a": (), "json.loads": ("s",), "json.b": ()})
    with pytest.raises(UnsupportedVllmError, match=r"SimpleNamespace\.waiting, .*num_gpu_blocks"):
        check_attributes(SimpleNamespace())


def test_a_scheduler_with_all_attributes_passes() -> None:
    scheduler = SimpleNamespace()
    for path in ATTRIBUTES:
        target = scheduler
        for part in path.split("."):
            if not hasattr(target, part):
                setattr(target, part, SimpleNamespace())
            target = getattr(target, part)
    check_attributes(scheduler)
