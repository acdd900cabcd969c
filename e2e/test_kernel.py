"""The kernel serves calls without any guest, and guests do without those that they do not need."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from e2e.kernel_alone import REFUSED
from e2e.servers import Launcher
from plait.gateway.app import GUESTS, Gateway
from plait.gateway.config.sections import Config
from plait.gateway.doors import Guest
from tests.kernel import GUESTS as ROOMS
from tests.source_tree import ROOT
from tests.waiting import WITHIN_S

DEFAULT = [name for name in GUESTS if GUESTS[name](Config())]
"""The guests that each gateway has."""


def served(tmp_path: Path, left_out: Sequence[str], guests: Sequence[str], paths: Collection[str]) -> dict[str, int]:
    """The statuses of calls, and of POSTs to these paths, where rooms are `left_out`."""
    with Launcher(tmp_path) as launch:
        engine = launch.engine("e")
        engine.start()
        engine.wait_until_ready()
        module = ["-m", "e2e.left_out", ",".join(left_out), "e2e.kernel_alone"]
        command = [sys.executable, *module, engine.url, ",".join(guests), *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def paths_of(guests: Sequence[Guest]) -> set[str]:
    """Those without parameters."""
    routes = [route for guest in guests for route in (*guest.calls, *guest.routes)]
    return {path for route in routes if "{" not in (path := getattr(route, "path", "{"))}


def staying(gone: str) -> list[str]:
    """The guests that can be made without one of them: each in its order, unless it needs one that is not there."""
    stay: list[str] = []
    for name in DEFAULT:
        with suppress(LookupError):
            if name != gone:
                Gateway(Config(), guests=[*stay, name])
                stay.append(name)
    return stay


def test_the_kernel_serves_without_its_guests(tmp_path: Path) -> None:
    paths = paths_of(Gateway(Config()).guests)
    assert len(paths) > 15
    statuses = served(tmp_path, ROOMS, (), paths)
    refused = REFUSED | dict.fromkeys(paths, 404)
    assert {name: status for name, status in statuses.items() if status != 200} == refused


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEFAULT)
def test_the_others_do_without_a_guest_and_those_that_need_it(tmp_path: Path, name: str) -> None:
    made = dict(zip(DEFAULT, Gateway(Config()).guests, strict=True))
    stay = staying(name)
    gone = [one for one in DEFAULT if one not in stay]
    lost, kept = (paths_of([made[one] for one in names]) for names in (gone, stay))
    statuses = served(tmp_path, [f"gateway/guests/{one}" for one in gone], stay, lost | kept)
    assert {path: statuses[path] for path in lost} == dict.fromkeys(lost, 404)
    assert not {path for path in kept if statuses[path] == 404}
    assert {call: statuses[call] for call in REFUSED} == REFUSED
    assert statuses["chat"] == 200
