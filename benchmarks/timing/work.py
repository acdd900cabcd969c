"""The iterations to time, and the shapes of models: plain values, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

BYTES = 2
"""Of a number in bf16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of Llama's kind. `width` is that of a head."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    intermediate: int
    vocabulary: int

    @property
    def kv_token_bytes(self) -> int:
        """What a token takes in the KV cache: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.width * BYTES


SHAPES = {
    "llama-8b": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256),
    "tiny": Shape("tiny", 2, 64, 8, 2, 8, 128, 512),
}
"""By name. `tiny` rehearses the benchmark without an accelerator."""


class Group(NamedTuple):
    """Calls of an iteration that are alike: each computes `new` tokens behind `context` tokens in the KV cache."""

    batch: int
    new: int
    context: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all calls."""
        return self.batch * self.new

    @property
    def slots(self) -> int:
        """Tokens of all calls in the KV cache at the end."""
        return self.batch * (self.new + self.context)


class Work(NamedTuple):
    """An iteration. One that is `held_out` checks the fit and is no part of it."""

    kind: str
    groups: tuple[Group, ...]
    held_out: bool = False

    @property
    def slots(self) -> int:
        """Tokens in the KV cache at the end."""
        return sum(group.slots for group in self.groups)


_LADDER = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(3072, 4096, 6144, 8192, 12_288, 16_384),
)
_BATCHES, _CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256), (512, 1024, 2048, 8192, 32_768)
_BEHIND, _PREFIXES = (16, 64, 256, 1024, 2048, 8192), (1024, 4096, 16_384, 32_768, 65_536, 122_880)

_UNEVEN = (
    *(Group(1, new) for new in (100, 300, 700, 1500, 3000, 5000, 10_000)),
    *(Group(1, 100, 5000), Group(1, 1000, 20_000), Group(1, 3000, 50_000)),
    *(Group(3, 1, 700), Group(24, 1, 1500), Group(48, 1, 3000), Group(160, 1, 900)),
)
_SEVERAL = (Group(4, 256), Group(8, 256), Group(16, 512), Group(4, 512, 4096))


def planned() -> Iterator[Work]:
    """All iterations, in the order in which they are timed."""
    yield from (Work("prefill", (Group(1, new),)) for new in _LADDER)
    yield from (Work("decode", (Group(*sizes),)) for sizes in product(_BATCHES, (1,), _CONTEXTS))
    yield from (Work("prefill behind context", (Group(1, *sizes),)) for sizes in product(_BEHIND, _PREFIXES))
    for chunk in (512, 2048):
        for context in (0, 8192):
            for decodes in (Group(16, 1, 1024), Group(64, 1, 2048), Group(128, 1, 1024)):
                yield Work("chunk and decodes", (Group(1, chunk, context), decodes), held_out=True)
    yield from (Work("uneven sizes", (group,), held_out=True) for group in _UNEVEN)
    yield from (Work("several prompts", (group,), held_out=True) for group in _SEVERAL)
