"""The check for the names that a plugin relies on, here on the standard library's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from plait.backends.adapter.required_names import missing_attributes, missing_names


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
