"""Transforms: a closed set of pure functions from text to text, which turn a completion into a variable's value.

`parse("code_block(python) | strip").apply(completion)` is the whole interface. docs/transforms.md is the reference.
No transform does I/O or reads a clock. For a given specification, each step takes at most linear time in its text.
"""

from __future__ import annotations

from plait.gateway.guests.programs.transforms.chain import MAX_RESULT_BYTES, Transform
from plait.gateway.guests.programs.transforms.errors import TransformError, TransformSpecError
from plait.gateway.guests.programs.transforms.spec import parse

__all__ = ["MAX_RESULT_BYTES", "Transform", "TransformError", "TransformSpecError", "parse"]
