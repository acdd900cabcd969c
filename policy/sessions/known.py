"""Which session a call is of: the one that its client names, or the one whose latest prompt it extends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from plait.policy.sessions.contexts import MOST_CONTEXTS, Context, Session

MOST_SESSIONS: Final = 10_000
"""So many are known. With one more, the one whose latest call is longest ago is forgotten."""


class KnownSessions:
    """The sessions of one model. `on_close` is called with a context that is not known any more."""

    def __init__(self, on_close: Callable[[Context], None]) -> None:
        self._on_close = on_close
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        self._named: dict[tuple[str, str], Session] = {}
        self._marks: dict[tuple[str, int], Context] = {}
        self._shared: OrderedDict[Context, None] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        """All of them. The one whose latest call is longest ago is the first."""
        return iter(self._sessions)

    def extended(self, tenant: str, name: str, hashes: Sequence[int]) -> Context | None:
        """The context that a prompt of these blocks goes on with; of the session of this `name`, if it is not empty."""
        if name:
            session = self._named.get((tenant, name))
            contexts = () if session is None else session.contexts
            found = next((context for context in contexts if context.is_extended_by(hashes)), None)
            return found or next((one for one in self._marked(tenant, hashes) if one.is_shared), None)
        return next(self._marked(tenant, hashes), None)

    def _marked(self, tenant: str, hashes: Sequence[int]) -> Iterator[Context]:
        """The contexts that a prompt of these blocks extends, those with the longest mark first."""
        marked = (self._marks.get((tenant, mark)) for mark in reversed(hashes))
        return filter(None, marked)

    def begin(self, tenant: str, name: str, now_s: float) -> Context:
        """A new context, of the session of this `name` if there is one, else of a new session."""
        session = self._named.get((tenant, name)) if name else None
        if session is None:
            session = Session(tenant, name, now_s)
            self._sessions[session] = None
            if name:
                self._named[tenant, name] = session
            if len(self._sessions) > MOST_SESSIONS:
                self._forget_oldest()
        elif len(session.contexts) >= MOST_CONTEXTS:
            self._close(min(session.contexts, key=lambda one: now_s if one.ended_s is None else one.ended_s))
        context = Context(session)
        session.contexts.append(context)
        return context

    def mark(self, context: Context, hashes: Sequence[int], place: int) -> None:
        """The context is known by the block in this place of its latest prompt; negative: by none."""
        tenant = context.session.tenant
        if context.mark is not None and self._marks.get((tenant, context.mark)) is context:
            del self._marks[tenant, context.mark]
        context.marked, context.mark = place, hashes[place] if place >= 0 else None
        context.blocks, context.last = len(hashes), hashes[-1] if hashes else None
        if context.mark is not None:
            self._marks[tenant, context.mark] = context

    def share(self, context: Context) -> None:
        """The context is none of a session. It stays known by its mark, so that later calls are none either."""
        if context.is_shared:
            return
        self._on_close(context)
        context.session.contexts.remove(context)
        context.is_shared = True
        if not context.session.contexts:
            context.session.prefill_s = 0.0
        self._shared[context] = None
        if len(self._shared) > MOST_SESSIONS:
            self.mark(self._shared.popitem(last=False)[0], (), -1)

    def called(self, session: Session) -> None:
        """A call of the session passes."""
        self._sessions.move_to_end(session)

    def _close(self, context: Context) -> None:
        self._on_close(context)
        self.mark(context, (), -1)
        context.session.contexts.remove(context)

    def _forget_oldest(self) -> None:
        session = next(iter(self._sessions))
        if session.calls or session.held:
            self._sessions.move_to_end(session)
            return
        for context in [*session.contexts]:
            self._close(context)
        del self._sessions[session]
        self._named.pop((session.tenant, session.name), None)
