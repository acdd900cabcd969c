"""Signals before a server handles them: they end the process at once, even as PID 1 of a container.

The command imports this before anything else, so this imports nearly nothing.
"""

from __future__ import annotations

import os
import signal


def let_end_process(number: int) -> None:
    """Let a signal end this process. The default action alone does not end PID 1."""
    signal.signal(number, end_process if os.getpid() == 1 else signal.SIG_DFL)


def end_process(number: int, _frame: object = None) -> None:
    """End this process at once, as by the default action of a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # reached by PID 1 only; the status that a shell gives to an end by a signal
