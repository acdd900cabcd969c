"""The stages of an application and their calls. A stage of two or more calls is a task group (Parrot, section 5.2)."""

from __future__ import annotations

from typing import Final, NamedTuple


class Stage(NamedTuple):
    """The calls whose longest path to the call with the id `awaited` has the same length, `distance` calls.

    Native steps do not count. What an awaited native step takes has the distance 0, so the step itself has -1.
    """

    awaited: str
    distance: int


LAST_STAGE: Final = Stage("", 0)
"""The calls of a session with an objective of its own of which nobody has said yet what they are for."""


class Stages:
    """The stage of each call that has one. `move` puts calls into stages."""

    __slots__ = ("_members", "_stages")

    def __init__(self) -> None:
        self._stages: dict[str, Stage] = {}
        self._members: dict[Stage, dict[str, None]] = {}

    def of(self, call_id: str) -> Stage | None:
        """The stage of a call; None without one."""
        return self._stages.get(call_id)

    def members(self, stage: Stage) -> tuple[str, ...]:
        """The calls of a stage, in the order in which they entered it."""
        return tuple(self._members.get(stage, ()))

    def is_group(self, stage: Stage) -> bool:
        """Whether the stage is a task group: two calls or more."""
        return len(self._members.get(stage, ())) > 1

    def move(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        """Put a call into a stage; None takes it out. Returns the other calls that enter or leave a task group by it.

        A call leaves its task group if it is now alone in its stage. It enters one if it no longer is.
        """
        before = self._stages.get(call_id)
        if stage == before:
            return ()
        return self._leave(call_id, before) + self._join(call_id, stage)

    def _leave(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        if stage is None:
            return ()
        del self._stages[call_id]
        members = self._members[stage]
        del members[call_id]
        if not members:
            del self._members[stage]
        return tuple(members) if len(members) == 1 else ()

    def _join(self, call_id: str, stage: Stage | None) -> tuple[str, ...]:
        if stage is None:
            return ()
        self._stages[call_id] = stage
        members = self._members.setdefault(stage, {})
        first = tuple(members) if len(members) == 1 else ()
        members[call_id] = None
        return first

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._stages == {call_id: stage for stage, members in self._members.items() for call_id in members}
        assert all(self._members.values()), "an empty stage was left behind"
