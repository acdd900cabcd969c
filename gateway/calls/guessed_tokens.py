"""Guesses how many tokens a text has before it is tokenized. The guess only weighs calls against each other."""

from __future__ import annotations

from typing import Final

CHARACTERS_PER_TOKEN: Final = 4
"""English text in most vocabularies."""
