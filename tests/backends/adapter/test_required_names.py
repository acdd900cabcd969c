"""The check for the names that a plugin relies on, here on the standard library's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from plait.backends.adapter.required_names import (
    RequiredNames,
    UnsupportedEngineError,
    missing_attributes,
    missing_names,
)

REQUIRED = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    methods={"json.a": (), "json.loads": ("s",), "json.b": ()},
    attributes=("pool.size", "queue"),
)


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


def test_attributes() -> None:
    target = SimpleNamespace(pool=SimpleNamespace(size=1))
    missing = ["SimpleNamespace.pool.free", "SimpleNamespace.queue"]
    assert list(missing_attributes(target, ("pool.size", "pool.free", "queue"))) == missing


def test_an_engine_that_lacks_some_is_refused_with_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("the_engine")
    package.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "the_engine", package)
    with pytest.raises(
        UnsupportedEngineError, match=r"The Engine \(9\.9\); it lacks: json\.a, json\.b\. Start it alone"
    ):
        REQUIRED.check_installed()
    with pytest.raises(UnsupportedEngineError, match=r"lacks: SimpleNamespace\.pool\.size, SimpleNamespace\.queue\."):
        REQUIRED.check_scheduler(SimpleNamespace())


def test_a_scheduler_with_all_attributes_passes() -> None:
    REQUIRED.check_scheduler(SimpleNamespace(pool=SimpleNamespace(size=1), queue=[]))
