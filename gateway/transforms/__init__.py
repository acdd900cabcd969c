"""Transforms: a closed set of pure functions from text to text that a semantic variable's value runs through.

`parse("code_block(python) | strip").apply(completion)` is all of it; docs/transforms.md is the reference for users.
Nothing here does I/O or reads a clock, and no step takes more than linear time in its text for a given specification.
"""

from __future__ import annotations

from plait.gateway.transforms.chain import MAX_RESULT_BYTES, Transform
from plait.gateway.transforms.errors import TransformError, TransformSpecError
from plait.gateway.transforms.spec import parse

__all__ = ["MAX_RESULT_BYTES", "Transform", "TransformError", "TransformSpecError", "parse"]
