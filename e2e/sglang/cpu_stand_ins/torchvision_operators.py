"""Lets the package index's torchvision, whose wheel is for GPUs, be imported beside a torch for the CPU.

Its compiled operators do not load there, but it registers Python kernels for them: what they are registered for has to
be declared. torch calls this as it is imported, before torchvision can be.
"""

from __future__ import annotations

import torch

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_library: list[torch.library.Library] = []
"""Operators are there for as long as the library is."""


def declare() -> None:
    """Declare the operators, without a kernel."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in OPERATORS:
        library.define(operator)
    _library.append(library)
