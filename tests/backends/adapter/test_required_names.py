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
DIFFERENT = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    methods={},
    attributes=(),
    either_method=({"json.load_all": (), "json.loads": ("s",)}, {"json.load_all": (), "json.loads": ("text",)}),
    either_attribute=(("slots", "most_running"), ("queue", "waiting")),
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


@pytest.fixture
def _the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("the_engine")
    package.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "the_engine", package)


@pytest.mark.usefixtures("_the_engine")
def test_an_engine_that_lacks_some_is_refused_with_all_that_is_missing() -> None:
    with pytest.raises(
        UnsupportedEngineError, match=r"The Engine \(9\.9\); it lacks: json\.a, json\.b\. Start it alone"
    ):
        REQUIRED.check_installed()
    with pytest.raises(UnsupportedEngineError, match=r"lacks: SimpleNamespace\.pool\.size, SimpleNamespace\.queue\."):
        REQUIRED.check_scheduler(SimpleNamespace())


def test_a_scheduler_with_all_attributes_passes() -> None:
    REQUIRED.check_scheduler(SimpleNamespace(pool=SimpleNamespace(size=1), queue=[]))


@pytest.mark.usefixtures("_the_engine")
def test_of_names_that_versions_differ_in_one_is_enough() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"lacks: json\.load_all or json\.loads\(text\)\. Start it alone"):
        DIFFERENT.check_installed()
    with pytest.raises(UnsupportedEngineError, match=r"lacks: Simple\w+\.queue or Simple\w+\.waiting\. Start it alone"):
        DIFFERENT.check_scheduler(SimpleNamespace(most_running=1))
    DIFFERENT.check_scheduler(SimpleNamespace(most_running=1, queue=[]))
