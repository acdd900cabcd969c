"""Mappings that usually have one entry or none, as nodes of the prefix tree do: a dict only from the second entry on.

In CPython 3.11 a dict of one entry takes 184 bytes with a string key and 224 with an integer. An empty one takes 64. A
`SingleEntry` takes 48. `EMPTY` is shared.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from types import MappingProxyType
from typing import Any, Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")

EMPTY: Final[Mapping[Any, Any]] = MappingProxyType({})


def with_entry(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """`mapping` with `key` set to `value`. A dict is changed in place."""
    if isinstance(mapping, dict):
        mapping[key] = value
        return mapping
    if not mapping or key in mapping:
        return SingleEntry(key, value)
    return {**mapping, key: value}


def without_entry(mapping: Mapping[K, V], key: K) -> Mapping[K, V]:
    """`mapping` without `key`. A dict is changed in place while it keeps two entries. Raises KeyError."""
    if not isinstance(mapping, dict):
        mapping[key]  # raises
        return EMPTY
    del mapping[key]
    return mapping if len(mapping) > 1 else SingleEntry(*mapping.popitem())


class SingleEntry(Mapping[K, V]):
    """A mapping of exactly one entry. It never changes."""

    __slots__ = ("_key", "_value")

    def __init__(self, key: K, value: V) -> None:
        self._key = key
        self._value = value

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[K]:
        return iter((self._key,))

    def __getitem__(self, key: K) -> V:
        if key == self._key:
            return self._value
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return key == self._key

    def __repr__(self) -> str:
        return repr({self._key: self._value})

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        """As of every mapping. Faster than the inherited one, which raises and catches KeyError."""
        return self._value if key == self._key else default

    def values(self) -> ValuesView[V]:
        """As of every mapping. Faster than the inherited one."""
        return {self._key: self._value}.values()

    def items(self) -> ItemsView[K, V]:
        """As of every mapping. Faster than the inherited one."""
        return {self._key: self._value}.items()
