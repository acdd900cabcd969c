"""The check for the names that the plugin relies on, here on the standard library's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from backends.vllm.compatibility import ATTRIBUTES, UnsupportedVllmError, check_attributes, check_names, missing_names


@pytest.mark.parametrize(
    ("name", "parameters", "missing"),
    [
        ("json.decoder.JSONDecoder.decode", ("s",), []),
        ("json.decoder.JSONDecoder", (), []),
        ("json.decoder.JSONDecoder.decode", ("text",), ["json.decoder.JSONDecoder.decode(text)"]),
        ("json.decoder.JSONDecoder.decode_all", (), ["json.decoder.JSONDecoder.decode_all"]),
        ("json.decoders.JSONDecoder.decode", (), ["json.decoders.JSONDecoder.decode"]),
        ("no_such_package.thing", (), ["no_such_package.thing"]),
    ],
)
def test_names_and_parameters(name: str, parameters: tuple[str, ...], missing: list[str]) -> None:
    assert list(missing_names({name: parameters})) == missing


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
