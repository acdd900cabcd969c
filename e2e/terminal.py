"""A pseudo-terminal with a `plait` command in it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from e2e.server_process import PLAIT
from tests.waiting import WITHIN_S

ROWS, COLUMNS = 45, 150
ENVIRONMENT = os.environ | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
ALTERNATE, NORMAL = "\x1b[?1049h", "\x1b[?1049l"
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """A pseudo-terminal with a process in it, and what that has written."""

    def __init__(self, command: list[str]) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(follower)
        self._follower = follower
        self.written = ""
        environment = {name: value for name, value in ENVIRONMENT.items() if value}
        self.process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True, env=environment
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._leader, 65536)
            except OSError:
                return
            if not piece:
                return
            self.written = (self.written + piece.decode(errors="replace"))[-400_000:]

    @property
    def text(self) -> str:
        """What was written, without what moves and colours."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to everything in it."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its modes, its cursor and its screen."""
        pairs = ((ALTERNATE, NORMAL), (HIDE, SHOW))
        ended = all(self.written.rfind(on) < self.written.rfind(off) for on, off in pairs)
        return ended and termios.tcgetattr(self._follower) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(WITHIN_S)
        os.close(self._follower)
        self._reader.join(WITHIN_S)
        os.close(self._leader)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    made = Terminal([str(PLAIT), *arguments])
    try:
        yield made
    finally:
        made.close()
