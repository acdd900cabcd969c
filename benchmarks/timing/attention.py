"""Attention over contiguous KV caches, by the kernels that PyTorch brings.

Queries have the shape (batch, new, heads, width), keys and values (batch, context + new, KV heads, width): the last
`new` of them are those of the queries' own tokens. A query attends to everything before it, and to itself. The output
has the shape of the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

TILE_TOKENS = 128
"""The rows of a kernel's tile. The heads of a group fill it together if there are fewer new tokens."""

MULTIPROCESSORS = 132
"""Of an H100 or H200: the tiles that are computed at once."""

CUDNN_TOKENS = 16
"""Fewer new tokens are not what cuDNN's kernels for prompts are made for."""


def flash(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """FlashAttention-2 in one call. For a single new token it splits the context among the multiprocessors."""
    return _flash(queries, keys, values, causal=queries.shape[1] > 1)[0]


def packed(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """FlashAttention-2 for context and new tokens by themselves. A group of heads reads the context once."""
    batch, new, heads, width = queries.shape
    context, kv_heads = keys.shape[1] - new, keys.shape[2]
    own, own_lse = _flash(queries, keys[:, context:], values[:, context:], causal=True)
    if not context:
        return own
    grouped = queries.view(batch, new, kv_heads, heads // kv_heads, width).transpose(2, 3)
    rows = grouped.reshape(batch, -1, kv_heads, width)
    out, lse = _flash(rows, keys[:, :context], values[:, :context], causal=False)
    before = out.view(grouped.shape).transpose(2, 3).reshape(queries.shape)
    before_lse = lse.view(batch, kv_heads, new, -1).transpose(2, 3).reshape(batch, heads, new)
    return _merge(before[None], before_lse[None], own, own_lse)


def cudnn(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of cuDNN, for context and new tokens by themselves: it aligns its mask with the first token.

    If the queries of a single call are too few for the device, parts of its context are computed side by side.
    """
    context = keys.shape[1] - queries.shape[1]
    if not context:
        return _cudnn(queries, keys, values, causal=True, with_lse=False)[0]
    own, own_lse = _cudnn(queries, keys[:, context:], values[:, context:], causal=True, with_lse=True)
    parts = _parts(queries, context)
    rows = queries if parts == 1 else queries.repeat(parts, 1, 1, 1)
    cut = (tensor[:, :context].unflatten(1, (parts, -1)).flatten(0, 1) for tensor in (keys, values))
    before, before_lse = _cudnn(rows, *cut, causal=False, with_lse=True)
    return _merge(before.unflatten(0, (parts, -1)), before_lse.unflatten(0, (parts, -1)), own, own_lse)


def cudnn_decode(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The attention of cuDNN, for one new token of each call."""
    return _cudnn(queries, keys, values, causal=False, with_lse=False)[0]


def reference(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The definition, in float64."""
    new, context = queries.shape[1], keys.shape[1] - queries.shape[1]
    group = queries.shape[2] // keys.shape[2]
    q = queries.double().transpose(1, 2)
    k, v = (tensor.double().transpose(1, 2).repeat_interleave(group, dim=1) for tensor in (keys, values))
    scores = q @ k.transpose(2, 3) / queries.shape[3] ** 0.5
    later = torch.ones(new, context + new, dtype=torch.bool, device=q.device).triu(context + 1)
    weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(1, 2).to(queries.dtype)


def candidates(new: int) -> dict[str, Attend]:
    """The kernels that may be the fastest for so many new tokens of a call."""
    if not torch.cuda.is_available():
        return {"reference": reference}
    if new == 1:
        return {"flash": flash, "cudnn_decode": cudnn_decode}
    found: dict[str, Attend] = {"flash": flash}
    if new < TILE_TOKENS:
        found["packed"] = packed
    if new >= CUDNN_TOKENS:
        found["cudnn"] = cudnn
    return found


def relative_error(found: Tensor, expected: Tensor) -> float:
    """The length of the difference by the length of what is expected; NaN if anything found is NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def _flash(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of the sum of exponentials (batch, heads, new)."""
    longest = queries.shape[1], keys.shape[1]
    found = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - the public ways to it refuse a longer context
        queries, keys, values, None, None, *longest, 0.0, causal, False
    )
    return found[0], found[1]


def _cudnn(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool, with_lse: bool) -> tuple[Tensor, Tensor]:
    heads_first = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - the public way leaves out the sums
        *heads_first, None, with_lse, 0.0, causal, False
    )
    batch, new, heads, _ = queries.shape
    return found[0].transpose(1, 2), found[1].reshape(batch, heads, new) if with_lse else found[1]


def _parts(queries: Tensor, context: int) -> int:
    """Into how many parts to cut the context: a power of two."""
    batch, new, heads, _ = queries.shape
    parts = 1
    if batch == 1:  # else the parts of several calls would not have the same distance from each other
        tiles = heads * ceil(new / TILE_TOKENS)
        while 2 * parts * tiles <= MULTIPROCESSORS and context % (2 * parts) == 0:
            parts *= 2
    return parts


def _merged(parts: Tensor, part_lses: Tensor, own: Tensor, own_lse: Tensor) -> Tensor:
    """Attention to all keys, from that to each part of the context and to the own tokens."""
    top = torch.maximum(part_lses.amax(dim=0), own_lse)
    shares, own_share = (torch.exp(lse - top).transpose(-1, -2).unsqueeze(-1) for lse in (part_lses, own_lse))
    return (((shares * parts).sum(dim=0) + own_share * own) / (shares.sum(dim=0) + own_share)).to(own.dtype)


_merge: Callable[..., Tensor] = torch.compile(_merged, dynamic=True)
