"""What released clients send, as `e2e/clients` recorded it in `tests/corpus/clients`, and the same with odd values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.call_routes import ROUTES
from tests.source_tree import ROOT

CORPUS = ROOT / "tests" / "corpus" / "clients"
RECORDED_MODEL = "demo"
ODD_VALUES: tuple[Any, ...] = (None, True, 7, -1.5, "odd", [], {}, [[]], [None], {"type": []})

Sent = dict[str, Any]
Place = tuple[str | int, ...]


def recorded() -> Iterator[tuple[str, Sent]]:
    """Each request that becomes a call if its model is served, with the name of its client."""
    for path in sorted(CORPUS.glob("*.json")):
        for sent in json.loads(path.read_bytes()):
            if sent["path"] in ROUTES and sent["body"]["model"] == RECORDED_MODEL:
                yield path.stem, sent


def odd(sent: Sent, places: set[tuple[str, ...]]) -> Iterator[Sent]:
    """The bodies that have one odd value, each in a place that is not in `places` yet; the places are added."""
    for place in _places(sent["body"]):
        holder = _at(sent["body"], place[:-1])
        kind = holder.get("type") if isinstance(holder, dict) else None
        form = (sent["path"], *(part if isinstance(part, str) else "*" for part in place), str(kind))
        if place and place[0] != "model" and form not in places:
            places.add(form)
            yield from (_with(sent["body"], place, value) for value in ODD_VALUES)


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    yield place
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield from _places(part, (*place, name))


def _at(value: Any, place: Place) -> Any:
    for name in place:
        value = value[name]
    return value


def _with(value: Any, place: Place, new: Any) -> Any:
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = _with(value[place[0]], place[1:], new)
    return copy
