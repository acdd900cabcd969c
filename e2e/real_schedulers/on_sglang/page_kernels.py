"""Finds the slots of new tokens on a CPU: before 0.5.22, SGLang's paged allocator has Triton's kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import paged


class _Kernel:
    """Called as Triton's are: `kernel[grid](...)`."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compute


def install() -> None:
    """Replace the kernels in a version that has nothing else."""
    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel, paged.alloc_decode_kernel = _Kernel(_extend), _Kernel(_decode)


def _extend(  # noqa: PLR0917 - the kernel's own parameters
    prefix_lens: Any, seq_lens: Any, last_loc: Any, free_pages: Any, slots: Any, _: int, page_size: int
) -> None:
    """SGLang's own for other devices. Without enough pages the allocator refuses what this fills in."""
    new = (seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size
    if int(new.sum()) <= len(free_pages):
        paged.alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, slots, page_size, "cpu")


def _decode(seq_lens: Any, last_loc: Any, free_pages: Any, slots: Any, _: int, page_size: int) -> None:
    begins = (seq_lens - 1) % page_size == 0
    rank = torch.cumsum(begins, 0) - 1
    if int(begins.sum()) <= len(free_pages):
        slots.copy_(last_loc + 1)
        slots[begins] = free_pages[rank[begins]] * page_size
