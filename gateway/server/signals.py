"""Signals until a server handles them: they end the process at once, also if it is process 1 of a container.

The command imports this before anything else, so it imports nearly nothing.
"""

from __future__ import annotations

import os
import signal


def let_end_process(number: int) -> None:
    """Let a signal end this process from now on. By its default action it would not end process 1."""
    signal.signal(number, end_process if os.getpid() == 1 else signal.SIG_DFL)


def end_process(number: int, _frame: object = None) -> None:
    """End this process at once, as by the default action of a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # only process 1 comes here; a shell gives an end by a signal this status
