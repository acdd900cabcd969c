"""What the engine does with each connection and call: a mode, or nothing wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

import msgspec

from e2e.faults.actions import Altered, AtAccept, Models, Raw, Report
from e2e.faults.modes import HEALTHY, MODES, Mode


class ModeRequest(msgspec.Struct, frozen=True, rename={"scope": "for"}):
    """The body of `PUT /mode`. `share` of the calls get one of the modes, chosen by `seed`.

    `scope` is `calls`, `probes` or `all`; without it, the mode's own. Of calls, those with `marker` in their bodies.
    """

    mode: str | list[str] = HEALTHY
    share: float = 1.0
    scope: str | None = None
    seed: int = 0
    marker: str = ""


@dataclass
class Plan:
    """Deals the modes out, in the same order for the same seed."""

    modes: Sequence[Mode] = ()
    share: float = 1.0
    scope: str | None = None
    dice: Random = field(default_factory=Random)
    marker: bytes = b""

    @classmethod
    def of(cls, request: ModeRequest) -> Plan:
        """Raises `KeyError` for a mode that is not known."""
        names = [request.mode] if isinstance(request.mode, str) else request.mode
        modes = [MODES[name] for name in names if name != HEALTHY]
        return cls(modes, request.share, request.scope, Random(request.seed), request.marker.encode())

    @property
    def full_backlog(self) -> bool:
        return any(isinstance(mode.action, AtAccept) and mode.action.full_backlog for mode in self.modes)

    @property
    def is_at_accept(self) -> bool:
        return any(isinstance(mode.action, AtAccept) for mode in self.modes)

    def accept(self) -> AtAccept | None:
        """For a new connection."""
        mode = self._deal([mode for mode in self.modes if isinstance(mode.action, AtAccept)])
        return None if mode is None else cast("AtAccept", mode.action)

    def call(self, body: bytes, *, streamed: bool) -> Mode | None:
        """For a call with this body."""
        if self.marker not in body:
            return None
        return self._deal(
            [
                mode
                for mode in self._of_scope("calls")
                if isinstance(mode.action, Raw | Altered) and mode.of.has(streamed=streamed)
            ]
        )

    def probe(self, path: str) -> Report | Models | Raw | None:
        """For a probe."""
        kinds = (Report,) if path == "/cache_state" else (Models, Raw)
        mode = self._deal([mode for mode in self._of_scope("probes") if isinstance(mode.action, kinds)])
        return None if mode is None else cast("Report | Models | Raw", mode.action)

    def _of_scope(self, scope: str) -> list[Mode]:
        return [mode for mode in self.modes if (self.scope or mode.scope) in {scope, "all"}]

    def _deal(self, modes: Sequence[Mode]) -> Mode | None:
        """One of the modes, or none; calls alone move the dice if the modes are about calls."""
        if not modes or (self.share < 1 and self.dice.random() >= self.share):
            return None
        return modes[0] if len(modes) == 1 else self.dice.choice(modes)
