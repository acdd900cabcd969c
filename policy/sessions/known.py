"""Sessions and their contexts: what their latest calls have, or have left, in the engines' KV caches.

Which session a call is of: the one that its client names, or the one whose latest prompt it extends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from plait.policy.types import Call

EXTENDED_SHARE: Final = 0.9
"""98.8 % of the turns of coding agents extend so much of the latest prompt. So do questions about a document."""

MOST_CONTEXTS: Final = 16
"""So many contexts of a session are known. With one more, the one that has been idle longest is forgotten."""

MOST_SESSIONS: Final = 10_000
"""So many are known. With one more, the one whose latest call is longest ago is forgotten."""


@dataclass(slots=True, eq=False)
class Context:
    """A conversation, or an agent's or a subagent's, as its latest prompt has left it.

    `tokens` is the prompt with its answer. The prompt has these whole tree blocks (none are kept while the session is
    not live). The hash of the one that the next prompt is known by is `mark`, in the place `marked`; that of the last
    one is `last`, in the place before `blocks`. So many `calls` of it have come and not ended. `ended_s` is None until
    one has. A context that `is_shared` is none of a session: it is a document that many ask about, for example.
    """

    session: Session
    tokens: int = 0
    hashes: Sequence[int] = ()
    marked: int = -1
    mark: int | None = None
    blocks: int = 0
    last: int | None = None
    calls: int = 0
    ended_s: float | None = None
    strayed: bool = False
    is_shared: bool = False

    def is_extended_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks extends the latest one."""
        return self.mark is not None and self.marked < len(hashes) and hashes[self.marked] == self.mark

    def is_continued_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks goes on where the latest one ended: it has all its whole blocks."""
        return self.blocks < len(hashes) and hashes[self.blocks - 1] == self.last


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one session. It was `born_s` when its first call came. `calls` are on their way or in an engine.

    A session `is_proven` once its client has named it, or a call has gone on where the one before had ended. Until then
    a session may be a document that others ask about, for example through other gateways.

    A live one may have its contexts in the engines' caches. `prefill_s` is what computing all of them takes. So many
    turns are `held`. The client has tried since `tried_s` to send one that has not passed (None: there is none).
    """

    tenant: str
    name: str
    born_s: float
    contexts: list[Context] = field(default_factory=list)
    is_proven: bool = False
    is_live: bool = False
    calls: int = 0
    held: int = 0
    ended_s: float = 0.0
    tried_s: float | None = None
    prefill_s: float = 0.0

    @property
    def tokens(self) -> int:
        """What its contexts have. Blocks that several have in common count for each."""
        return sum(context.tokens for context in self.contexts)


class KnownSessions:
    """The sessions of one model. `on_close` is called with a context that is not known any more.

    `marks` has the contexts by tenant and mark.
    """

    def __init__(self, on_close: Callable[[Context], None]) -> None:
        self._on_close = on_close
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        self._named: dict[tuple[str, str], Session] = {}
        self.marks: dict[tuple[str, int], Context] = {}
        self._shared: OrderedDict[Context, None] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        """All of them. The one whose latest call is longest ago is the first."""
        return iter(self._sessions)

    def extended(self, tenant: str, name: str, hashes: Sequence[int]) -> Context | None:
        """The context that a prompt of these blocks goes on with; of the session of this `name`, if it is not empty.

        Of several contexts without a name, it is the one with the longest mark.
        """
        session = self._named.get((tenant, name)) if name else None
        if session is not None:
            for context in session.contexts:
                if context.is_extended_by(hashes):
                    return context
        marks = self.marks
        if marks:
            for mark in reversed(hashes):
                marked = marks.get((tenant, mark))
                if marked is not None and (marked.is_shared or not name):
                    return marked
        return None

    def begin(self, tenant: str, name: str, now_s: float) -> Context:
        """A new context, of the session of this `name` if there is one, else of a new session."""
        session = self._named.get((tenant, name)) if name else None
        if session is None:
            session = Session(tenant, name, now_s, is_proven=bool(name))
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
        if context.mark is not None and self.marks.get((tenant, context.mark)) is context:
            del self.marks[tenant, context.mark]
        context.marked, context.mark = place, hashes[place] if place >= 0 else None
        context.blocks, context.last = len(hashes), hashes[-1] if hashes else None
        if context.mark is not None:
            self.marks[tenant, context.mark] = context

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
        self._sessions.move_to_end(session)

    def _close(self, context: Context) -> None:
        self._on_close(context)
        context.hashes, context.tokens = (), 0  # a call of it may be on its way still
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


def marked_block(call: Call) -> int:
    """The place of the block of a prompt that the next one is known by; negative if the prompt is too short."""
    return min(len(call.block_hashes), round(EXTENDED_SHARE * call.prompt_tokens) // call.block_tokens) - 1
