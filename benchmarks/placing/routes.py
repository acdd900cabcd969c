"""Routes: the prefixes whose calls go to other engines than E2 would choose.

A prefix is at home where E2 sends its calls. The calls of a shifted prefix go to another engine instead, and come back
while it returns. Those of a replicated prefix are divided between several engines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from plait.policy.prefix.prefix_tree import Node, Segment


class RouteReason(StrEnum):
    """Why a call went elsewhere than E2 would send it."""

    DECODE_BALANCE = "decode_balance"
    SHIFT = "shift"
    REPLICA = "replica"


class RouteState(StrEnum):
    """The state of a prefix."""

    HOME = "home"
    SHIFTED = "shifted"
    RETURNING = "returning"
    REPLICATED = "replicated"


ROUTE_TRANSITIONS: dict[RouteState, frozenset[RouteState]] = {
    RouteState.HOME: frozenset((RouteState.SHIFTED, RouteState.REPLICATED)),
    RouteState.SHIFTED: frozenset((RouteState.HOME, RouteState.RETURNING, RouteState.REPLICATED)),
    RouteState.RETURNING: frozenset((RouteState.HOME, RouteState.REPLICATED)),
    RouteState.REPLICATED: frozenset((RouteState.HOME, RouteState.REPLICATED)),
}
"""A shifted prefix may go home at once, because nobody uses it. A replicated prefix may get a further replica."""


class RouteTransitionError(RuntimeError):
    """A prefix cannot enter a state from the one in which it is. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where the calls through a prefix go since `since_s`: from the engine `home` to `others`, or back.

    `load_s` is what they cost in one window. `parts` maps the first block of a child of the prefix's node to the
    engine that got the child. A replicated prefix had `calls` in the window; their mean queueing time was `calm_s`
    before it doubled.
    """

    state: RouteState
    home: str
    others: tuple[str, ...]
    since_s: float
    load_s: float
    parts: Mapping[int, str] = field(default_factory=dict)
    calls: int = 0
    calm_s: float = 0.0

    @property
    def engine_ids(self) -> tuple[str, ...]:
        """The engines that get calls, or got them."""
        return (self.home, *self.others)


class Routes:
    """The routes of a fleet, by the last node of the prefix. A prefix without a route is at home."""

    def __init__(self) -> None:
        self._routes: dict[Node, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def __iter__(self) -> Iterator[tuple[Node, Route]]:
        """All of them, the oldest first."""
        return iter(self._routes.items())

    def __contains__(self, node: Node) -> bool:
        return node in self._routes

    def of_state(self, *states: RouteState) -> Iterator[tuple[Node, Route]]:
        """The prefixes in these states. Routes may change during the loop."""
        return iter([(node, route) for node, route in self._routes.items() if route.state in states])

    def get(self, node: Node) -> Route | None:
        """The route of one prefix."""
        return self._routes.get(node)

    def on(self, path: Sequence[Segment]) -> tuple[Node, Route] | None:
        """The deepest prefix of a call that has a route."""
        if self._routes:
            for segment in reversed(path):
                route = self._routes.get(segment.node)
                if route is not None and segment.blocks == len(segment.node):
                    return segment.node, route
        return None

    def enter(self, node: Node, route: Route) -> None:
        """Give a prefix a route. Raises `RouteTransitionError` if its state has no such step."""
        self._check_step(node, route.state)
        self._routes[node] = route

    def end(self, node: Node) -> None:
        """The prefix is at home again. Raises `RouteTransitionError` if it is already."""
        self._check_step(node, RouteState.HOME)
        del self._routes[node]

    def keep(self, groups: Iterable[Collection[str]]) -> None:
        """End the routes whose prefix nobody uses, and those whose engines are not all in one of the `groups`."""
        sets = [frozenset(group) for group in groups]
        for node, route in list(self._routes.items()):
            in_use = any(holding.sharers for holding in node.holdings.values())
            if not in_use or not any(group.issuperset(route.engine_ids) for group in sets):
                self.end(node)

    def _check_step(self, node: Node, state: RouteState) -> None:
        before = self._routes[node].state if node in self._routes else RouteState.HOME
        if state not in ROUTE_TRANSITIONS[before]:
            raise RouteTransitionError(f"a prefix that is {before} cannot become {state}")
