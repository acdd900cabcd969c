"""The check for the names that a plugin relies on, here on the standard library's."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from plait.backends.adapter.required_names import (
    Names,
    RequiredNames,
    UnsupportedEngineError,
    missing_attributes,
    missing_names,
)

REQUIRED = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    reports=Names(methods={"json.a": (), "json.loads": ("s",), "json.b": ()}, attributes=("pool.size", "queue")),
)
DIFFERENT = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    reports=Names(
        either_method=({"json.load_all": (), "json.loads": ("s",)}, {"json.load_all": (), "json.loads": ("text",)}),
    ),
)
ATTRIBUTES = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    reports=Names(attributes=("pool.size",), either_attribute=(("slots", "most_running"), ("queue", "waiting"))),
)
TIERED = RequiredNames(
    engine="The Engine",
    package="the_engine",
    without_plait="Start it alone",
    reports=Names(methods={"json.loads": ("s",)}, attributes=("pool",)),
    order=Names(methods={"json.dumps": ()}, attributes=("queue",)),
    chunks=Names(methods={"json.cut": ()}, attributes=("limits",)),
)


@pytest.mark.parametrize(
    ("name", "parameters", "missing"),
    [
        ("json.decoder.JSONDecoder.decode", ("s",), []),
        ("json.decoder.JSONDecoder", (), []),
        ("json.decoder.JSONDecoder.decode", ("text",), ["json.decoder.JSONDecoder.decode(text)"]),
        ("json.decoder.JSONDecoder.decode", ("s?",), []),
        ("json.decoder.JSONDecoder.decode", ("text?",), ["json.decoder.JSONDecoder.decode(text?)"]),
        ("json.decoder.JSONDecoder.__repr__", ("s?",), []),
        ("json.decoder.JSONDecoder.__repr__", ("s", "text?"), ["json.decoder.JSONDecoder.__repr__(s, text?)"]),
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
        REQUIRED.installed_tier()


@pytest.mark.usefixtures("_the_engine")
def test_a_scheduler_that_lacks_some_is_refused_with_all_that_is_missing() -> None:
    with pytest.raises(
        UnsupportedEngineError,
        match=r"lacks: \w+\.pool\.size, \w+\.slots or \w+\.most_running, \w+\.queue or \w+\.waiting\.",
    ):
        ATTRIBUTES.check_scheduler(SimpleNamespace())


def test_a_scheduler_with_all_attributes_passes() -> None:
    ATTRIBUTES.check_scheduler(SimpleNamespace(pool=SimpleNamespace(size=1), most_running=1, queue=[]))


@pytest.mark.usefixtures("_the_engine")
def test_of_names_that_versions_differ_in_one_is_enough() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"lacks: json\.load_all or json\.loads\(text\)\. Start it alone"):
        DIFFERENT.installed_tier()
    with pytest.raises(UnsupportedEngineError, match=r"lacks: Simple\w+\.queue or Simple\w+\.waiting\. Start it alone"):
        ATTRIBUTES.check_scheduler(SimpleNamespace(pool=SimpleNamespace(size=1), most_running=1))


@pytest.mark.usefixtures("_the_engine")
@pytest.mark.parametrize(
    ("attributes", "tier", "missing"),
    [
        (("pool", "queue", "limits"), "order", "json.cut"),
        (("pool", "limits"), "reports", "SimpleNamespace.queue, json.cut"),
        (("pool",), "reports", "SimpleNamespace.queue, json.cut, SimpleNamespace.limits"),
    ],
)
def test_the_highest_tier_without_a_missing_name_is_taken(
    attributes: tuple[str, ...], tier: str, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert TIERED.installed_tier() == "order"
    assert not caplog.messages, "attributes may be missing, too"
    assert TIERED.scheduler_tier(SimpleNamespace(**dict.fromkeys(attributes))) == tier
    assert caplog.messages == [f"Plait's tier in this The Engine (9.9) is {tier!r}; it lacks: {missing}"]


@pytest.mark.usefixtures("_the_engine")
def test_an_engine_below_the_tier_that_is_asked_for_is_refused() -> None:
    refused = r"this The Engine \(9\.9\) in the tier 'chunks', which .* needs; it lacks: json\.cut\. Start it alone"
    with pytest.raises(UnsupportedEngineError, match=refused):
        TIERED.installed_tier("chunks")
    scheduler = SimpleNamespace(pool=None, limits=None)
    with pytest.raises(UnsupportedEngineError, match=r"'order', which .* lacks: SimpleNamespace\.queue\. Start"):
        TIERED.scheduler_tier(scheduler, "order")
    assert TIERED.scheduler_tier(scheduler, "reports") == "reports"


@pytest.mark.usefixtures("_the_engine")
def test_what_was_found_before_the_plugin_took_the_places_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = SimpleNamespace(pool=SimpleNamespace(size=1), most_running=1, queue=[])
    installed = ATTRIBUTES.missing_installed()
    assert ATTRIBUTES.scheduler_tier(scheduler, "chunks", installed) == "chunks"
    with pytest.raises(UnsupportedEngineError, match=r"lacks: json\.hooked"):
        ATTRIBUTES.scheduler_tier(scheduler, "chunks", {**installed, "reports": ["json.hooked"]})
