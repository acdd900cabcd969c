"""How texts are sized before they are tokenized: English, by most vocabularies. It only weighs calls."""

from __future__ import annotations

from typing import Final

CHARACTERS_PER_TOKEN: Final = 4
