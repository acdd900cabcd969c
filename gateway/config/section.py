"""The base of the configuration's sections."""

from __future__ import annotations

import msgspec

from plait.gateway.config.values import SECRET_KEYS


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the file. Its `repr` hides API keys, so that a logged configuration does not reveal them."""

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        shown = (f"{name}={'(hidden)' if name in SECRET_KEYS and value else repr(value)}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"
