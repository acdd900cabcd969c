"""The table of engines: each row is whole, and has the folder that it speaks of."""

from __future__ import annotations

import pytest

from plait.backends.protocol.dialects import ADAPTED, DIALECTS
from tests.source_tree import ROOT


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_row_has_its_own_name(kind: str) -> None:
    assert DIALECTS[kind].kind == kind


@pytest.mark.parametrize("kind", DIALECTS)
def test_a_kind_that_is_started_reports_from_its_folder(kind: str) -> None:
    folder = ROOT / ("lab" if kind == "embedded" else "backends") / kind
    assert folder.is_dir() == (kind in ADAPTED)
    assert (folder / "launch.py").exists() == (DIALECTS[kind].launcher is not None)


def test_an_engine_without_an_adapter_gets_no_ids() -> None:
    assert not [row.kind for row in DIALECTS.values() if row.parameters is None and row.chat_ids is not None]
