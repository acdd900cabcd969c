"""Progress on stderr: lines in a file, a bar on a terminal."""

from __future__ import annotations

import os
import pty
import sys
from contextlib import suppress

import pytest

from plait.lab.commands.demo import progress_of


def report() -> None:
    with progress_of(2) as progress:
        for label in ("first", "second"):
            for done in range(1, 501):
                progress(label, done, 500)


def test_a_file_gets_a_line_for_each_part(capsys: pytest.CaptureFixture[str]) -> None:
    report()
    assert capsys.readouterr().err == "first: 500 calls\nsecond: 500 calls\n"


def test_a_terminal_gets_a_bar_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        report()
    shown = b""
    with suppress(OSError):  # what reading raises where a terminal has ended
        while piece := os.read(ours, 1 << 16):
            shown += piece
    os.close(ours)
    assert b"second" in shown
    assert b"100%" in shown
    assert shown.endswith(b"\x1b[2K")
