"""A forward pass as serving engines do it: a model of Llama's shape with random weights, and a KV cache for each layer.

QKV and gate-up are one matrix each. Norms, rotation with the write into the KV cache, and the activation are fused by
torch.compile. Only the last token of each call gets logits; the most likely token is taken. The KV cache of a call is
contiguous, not paged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.timing.attention import Attend
from benchmarks.timing.work import Group, Shape

EPSILON = 1e-5
ROPE_BASE = 500_000.0
"""Both as in Llama 3."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights: those of the norms, and matrices (out, in)."""

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """An iteration's inputs: ids and rotations of its tokens, the last row of each call, a kernel for each group."""

    groups: Sequence[Group]
    attends: Sequence[Attend]
    ids: Tensor
    cosines: Tensor
    sines: Tensor
    last_rows: Tensor


class ForwardPass:
    """The model. `device` is torch's; weights and caches are drawn by `seed`."""

    def __init__(self, shape: Shape, device: str, seed: int = 1) -> None:
        self.shape = shape
        self.device = device
        torch.manual_seed(seed)
        rows = (shape.heads + 2 * shape.kv_heads) * shape.width
        matrices = {
            "qkv": (rows, shape.hidden),
            "out": (shape.hidden, shape.heads * shape.width),
            "gate_up": (2 * shape.intermediate, shape.hidden),
            "down": (shape.hidden, shape.intermediate),
        }
        self.embedding = self._drawn(shape.vocabulary, shape.hidden)
        self.head = self._drawn(shape.vocabulary, shape.hidden)
        self.norm = self._ones()
        self.layers = [
            Layer(
                **{name: self._drawn(*size) for name, size in matrices.items()},
                **{name: self._ones() for name in ("attention_norm", "mlp_norm")},
            )
            for _ in range(shape.layers)
        ]
        self.caches: list[tuple[Tensor, Tensor]] = []

    def allocate(self, kv_tokens: int) -> None:
        """Make keys and values of each layer (tokens, KV heads, width)."""
        size = (kv_tokens, self.shape.kv_heads, self.shape.width)
        for _ in self.layers:
            keys, values = (torch.empty(size, dtype=torch.bfloat16, device=self.device) for _ in range(2))
            self.caches.append((keys, values))
        self.fill()

    def fill(self, number: float | None = None) -> None:
        """Fill the KV cache with a number, or with random ones."""
        for tensor in (tensor for cache in self.caches for tensor in cache):
            if number is None:
                tensor.normal_()
            else:
                tensor.fill_(number)

    def batch(self, groups: Sequence[Group], attends: Sequence[Attend], ids: Tensor | None = None) -> Batch:
        """The inputs of an iteration; random `ids` if none are given."""
        starts = [group.context + torch.arange(group.new).repeat(group.batch) for group in groups]
        positions = torch.cat(starts).to(self.device)
        half = torch.arange(0, self.shape.width, 2, device=self.device) / self.shape.width
        angles = positions[:, None].float() * ROPE_BASE**-half
        lengths = torch.tensor([group.new for group in groups for _ in range(group.batch)], device=self.device)
        if ids is None:
            ids = torch.randint(self.shape.vocabulary, (len(positions),), device=self.device)
        return Batch(groups, attends, ids, angles.cos(), angles.sin(), lengths.cumsum(0) - 1)

    def __call__(self, batch: Batch) -> Tensor:
        """The next token of each call."""
        return self.logits(batch).float().argmax(dim=-1)

    def logits(self, batch: Batch) -> Tensor:
        """The logits of each call's last token (calls, vocabulary)."""
        residual = functional.embedding(batch.ids, self.embedding)
        normed = _norm(residual, self.layers[0].attention_norm)
        following = [layer.attention_norm for layer in self.layers[1:]] + [self.norm]
        for layer, cache, next_norm in zip(self.layers, self.caches, following, strict=True):
            attended = self._attention(functional.linear(normed, layer.qkv), cache, batch)
            normed, residual = _add_norm(functional.linear(attended, layer.out), residual, layer.mlp_norm)
            active = _activate(functional.linear(normed, layer.gate_up))
            normed, residual = _add_norm(functional.linear(active, layer.down), residual, next_norm)
        return functional.linear(normed.index_select(0, batch.last_rows), self.head)

    def _attention(self, qkv: Tensor, cache: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """Put the new keys and values into the cache, and attend to it; rows of `qkv` to rows of heads x width."""
        row = slot = 0
        outputs = []
        for group, attend in zip(batch.groups, batch.attends, strict=True):
            rows = slice(row, row + group.tokens)
            keys, values = (cached(tensor, slot, group) for tensor in cache)
            queries = _rotate_and_store(
                qkv[rows].view(group.batch, group.new, -1, self.shape.width),
                *(angles[rows].view(group.batch, group.new, 1, -1) for angles in (batch.cosines, batch.sines)),
                keys[:, group.context :],
                values[:, group.context :],
            )
            outputs.append(attend(queries, keys, values).reshape(group.tokens, -1))
            row, slot = row + group.tokens, slot + group.slots
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def weight_bytes(self) -> int:
        """What the weights take."""
        layers = [tensor for layer in self.layers for tensor in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return sum(int(tensor.nbytes) for tensor in (self.embedding, self.head, *layers))

    def _drawn(self, out: int, into: int) -> Tensor:
        """Numbers of a scale that keeps that of the activations."""
        return torch.randn(out, into, dtype=torch.bfloat16, device=self.device) * into**-0.5

    def _ones(self) -> Tensor:
        return torch.ones(self.shape.hidden, dtype=torch.bfloat16, device=self.device)


def cached(tensor: Tensor, slot: int, group: Group) -> Tensor:
    """A group's part of a layer's keys or values, which begins at `slot`: (batch, context + new, KV heads, width)."""
    return tensor[slot : slot + group.slots].view(group.batch, -1, *tensor.shape[1:])


def _normed(hidden: Tensor, weight: Tensor) -> Tensor:
    whole = hidden.float()
    scale = torch.rsqrt(whole.square().mean(dim=-1, keepdim=True) + EPSILON)
    return (whole * scale).to(hidden.dtype) * weight


def _added_and_normed(hidden: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = hidden + residual
    return _normed(total, weight), total


def _activated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _rotated_and_stored(rows: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The rotated queries. The rotated keys and the values are written to the cache."""
    kv_heads = keys.shape[2]
    heads = rows.shape[2] - 2 * kv_heads
    first, second = rows[:, :, : heads + kv_heads].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1).to(rows.dtype)
    keys.copy_(rotated[:, :, heads:])
    values.copy_(rows[:, :, heads + kv_heads :])
    return rotated[:, :, :heads].contiguous()


_norm = torch.compile(_normed, dynamic=True)
_add_norm = torch.compile(_added_and_normed, dynamic=True)
_activate = torch.compile(_activated, dynamic=True)
_rotate_and_store: Callable[..., Tensor] = torch.compile(_rotated_and_stored, dynamic=True)
