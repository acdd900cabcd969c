"""How many examples a property test draws."""

from __future__ import annotations

import os
from typing import Final

NIGHTLY: Final = "PLAIT_NIGHTLY" in os.environ


def examples(most: int) -> int:
    """`most` in nightly runs, which draw new ones; a third of them in others, which draw the same ones each time."""
    return most if NIGHTLY else most // 3
