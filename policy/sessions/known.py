"""The sessions of one model and their contexts: the prompts and answers that their latest calls left in KV caches.

A call belongs to the session that its client names, or else to the one whose latest prompt it extends. Because block
hashes are chained, one block's hash decides whether a prompt extends another one: the *mark* of a context is the hash
at nine tenths of its latest prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from plait.policy.types import Call

EXTENDED_SHARE: Final = 0.9
"""98.8 % of the turns of coding agents extend this part of the latest prompt. So do questions about a document."""

MOST_CONTEXTS: Final = 16
"""The most contexts of a session. With one more, the one that has been idle longest is forgotten."""

MOST_SESSIONS: Final = 10_000
"""The most sessions of a model. With one more, the one with the oldest latest call is forgotten."""


@dataclass(slots=True, eq=False)
class Context:
    """The context of a conversation, an agent or a subagent, as its latest prompt left it."""

    session: Session
    tokens: int = 0
    """The latest prompt and its answer."""
    hashes: Sequence[int] = ()
    """The prompt's whole tree blocks; empty while the session is not live."""
    marked: int = -1
    """The index of the marked block; negative: none."""
    mark: int | None = None
    """The hash of the marked block. A prompt with it extends the latest one."""
    blocks: int = 0
    """The number of the prompt's whole blocks."""
    last: int | None = None
    """The hash of the last whole block. A longer prompt with this block continues the latest one."""
    calls: int = 0
    """Calls that have arrived and not ended."""
    ended_s: float | None = None
    """When a call last ended; None: none has."""
    strayed: bool = False
    """The latest call extended the context without a name, and did not continue it."""
    is_shared: bool = False
    """The context belongs to no session, for example a document that many calls ask about."""

    def is_extended_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks has the latest prompt up to the mark."""
        return self.mark is not None and self.marked < len(hashes) and hashes[self.marked] == self.mark

    def is_continued_by(self, hashes: Sequence[int]) -> bool:
        """Whether a prompt of these blocks has all whole blocks of the latest prompt, and more."""
        return self.blocks < len(hashes) and hashes[self.blocks - 1] == self.last


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one session."""

    tenant: str
    name: str
    born_s: float
    """When its first call arrived."""
    contexts: list[Context] = field(default_factory=list)
    is_proven: bool = False
    """The client named the session, or a call continued the one before. Otherwise it may be a shared document, whose
    other questions come through other gateways.
    """
    is_live: bool = False
    """Its contexts count as being in the engines' caches."""
    calls: int = 0
    """Turns that have passed the gate and not ended."""
    held: int = 0
    """Turns that the gate holds."""
    ended_s: float = 0.0
    tried_s: float | None = None
    """Since when the client has tried to send a turn that has not passed; None: there is none."""
    prefill_s: float = 0.0
    """Seconds to compute all contexts."""

    @property
    def tokens(self) -> int:
        """The sum over its contexts; blocks in several contexts count for each."""
        return sum(context.tokens for context in self.contexts)


class KnownSessions:
    """The sessions of one model. `on_close` is called with each context that is forgotten or becomes shared.

    `marks` has the contexts by tenant and mark, `named` the sessions that clients name by tenant and name.
    """

    def __init__(self, on_close: Callable[[Context], None]) -> None:
        self._on_close = on_close
        self._sessions: OrderedDict[Session, None] = OrderedDict()
        self.named: dict[tuple[str, str], Session] = {}
        self.marks: dict[tuple[str, int], Context] = {}
        self._shared: OrderedDict[Context, None] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        """The sessions, those with the oldest latest call first."""
        return iter(self._sessions)

    def extended(self, tenant: str, name: str, hashes: Sequence[int]) -> Context | None:
        """The context that a prompt of these blocks extends. With a `name`, it is of this session or shared.

        Among several, the one with the mark furthest into the prompt.
        """
        session = self.named.get((tenant, name)) if name else None
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
        """Add a context to the session of this `name`, or to a new session."""
        session = self.named.get((tenant, name)) if name else None
        if session is None:
            session = Session(tenant, name, now_s, is_proven=bool(name))
            self._sessions[session] = None
            if name:
                self.named[tenant, name] = session
            if len(self._sessions) > MOST_SESSIONS:
                self._forget_oldest()
        elif len(session.contexts) >= MOST_CONTEXTS:
            self._close(min(session.contexts, key=lambda one: now_s if one.ended_s is None else one.ended_s))
        context = Context(session)
        session.contexts.append(context)
        return context

    def mark(self, context: Context, hashes: Sequence[int], place: int) -> None:
        """Record the context's latest prompt, and mark its block at the index `place`; negative: none."""
        tenant = context.session.tenant
        if context.mark is not None and self.marks.get((tenant, context.mark)) is context:
            del self.marks[tenant, context.mark]
        context.marked, context.mark = place, hashes[place] if place >= 0 else None
        context.blocks, context.last = len(hashes), hashes[-1] if hashes else None
        if context.mark is not None:
            self.marks[tenant, context.mark] = context

    def share(self, context: Context) -> None:
        """Take a context out of its session. Its mark stays, so that later calls that extend it count as chat."""
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
        context.hashes, context.tokens = (), 0  # a call of the context may still end and look at these
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
        self.named.pop((session.tenant, session.name), None)


def marked_block(call: Call) -> int:
    """The index of the block to mark in a call's prompt; negative if the prompt is too short."""
    return min(len(call.block_hashes), round(EXTENDED_SHARE * call.prompt_tokens) // call.block_tokens) - 1
