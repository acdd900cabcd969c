"""The exact content of SGLang's radix cache as tree blocks, from the cache's events about its pages.

SGLang names a page by its own hash, chained over the tokens and the cache salt up to the page's end. A page is stored
after its parent and evicted before its parent, so all of a tree block is cached exactly while its last page is. A large
page is the last of several tree blocks. Pages whose KV depends on more than tokens (behind an image, for example) are
not reported.

SGLang drops sliding windows and states without an event, and then no hit can end there (`untold`).

With HiCache, there are events for copies in host memory too. A tree block is reported in the fastest tier that has its
last page. No version of SGLang has events for a storage backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from plait.backends.adapter.cache_journal import CacheJournal
from plait.backends.adapter.calls_journal import CallsJournal
from plait.backends.adapter.tree_block_tiers import TreeBlockTiers
from plait.backends.sglang.channel import NewsSender, Report
from plait.backends.sglang.compatibility import SaltedEvents, kind_of, salt_of
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS, chain, root_hash

ACCELERATOR: Final = frozenset({None, "GPU"})
"""The media of pages that calls can use without a transfer."""
HOST: Final = frozenset({"CPU", "CPU_PINNED"})
"""The media of pages in host memory."""
_TOLD: Final = ACCELERATOR | HOST

_root_hash = lru_cache(maxsize=4096)(root_hash)


@dataclass(slots=True, eq=False)
class _Page:
    before: int | None
    """The hash of the last tree block that ends at or before the page's end; None: not known, so not reported."""
    previous: _Page | None = None
    """The page before this one, if the tokens behind that tree block begin there."""
    tokens: Sequence[int] = ()
    """The page's tokens behind that tree block."""
    open_tokens: int = 0
    """How many tokens are behind that tree block, with those of the pages before."""
    tree_blocks: Sequence[int] = ()
    """The hashes of the tree blocks that end with this page."""
    parent: int | None = None
    """The hash of the tree block before those."""
    copies: int = 0
    """Copies on the accelerator."""
    in_host: bool = False

    @property
    def tier(self) -> int | None:
        return 0 if self.copies else 1 if self.in_host else None


class CacheObserver:
    """Reads the cache's events. `journal` has the tree blocks on the accelerator, `host` those in host memory only.

    `model` is the model's name for calls without a LoRA adapter. `untold` is `CacheState.untold`.
    """

    def __init__(self, *, page_tokens: int, model: str, untold: str = "") -> None:
        self.journal = CacheJournal()
        self.host = CacheJournal(changes=self.journal.changes)
        self.page_tokens = page_tokens
        self.model = model
        self.untold = untold
        self._pages: dict[int, _Page] = {}
        self._tiers = TreeBlockTiers(self.journal, self.host)

    def root(self, cache_salt: str | None) -> int:
        """The hash before a prompt's first block."""
        return _root_hash(self.model, cache_salt or "")

    def observe(self, events: Iterable[Any]) -> None:
        """Read events in order: the cache has stored or removed pages, or was cleared."""
        for event in events:
            name = kind_of(event)
            if name == "AllBlocksCleared":
                self._clear()
            elif event.medium not in _TOLD:
                continue
            elif name == "BlockStored":
                self._stored(event)
            elif name == "BlockRemoved":
                for key in event.block_hashes:
                    self._removed(key, in_host=event.medium in HOST)

    def _stored(self, event: Any) -> None:
        size, tokens, parent = event.block_size, event.token_ids, event.parent_block_hash
        if tokens and isinstance(tokens[0], tuple):  # pages of a draft model have pairs of a token and the next
            tokens = [first for first, _ in tokens]
        for index, key in enumerate(event.block_hashes):
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = self._page(parent, tokens[index * size : (index + 1) * size], event)
            if event.medium in HOST:
                self._place(page, page.copies, in_host=True)
            else:
                self._place(page, page.copies + 1, in_host=page.in_host)
            parent = key

    def _page(self, parent_key: int | None, tokens: Sequence[int], event: Any) -> _Page:
        """A new page, which no tier has yet."""
        before, previous = self._behind(parent_key, event)
        if before is None or len(tokens) != self.page_tokens:
            return _Page(None)
        page = _Page(before, previous, tokens, self.page_tokens + (previous.open_tokens if previous is not None else 0))
        if page.open_tokens < TREE_BLOCK_TOKENS:
            return page
        tokens = _open_tokens(page)
        try:
            blocks = chain(tokens, TREE_BLOCK_TOKENS, before)
        except OverflowError:  # placeholders of an image are no token ids
            return _Page(None)
        rest = tokens[len(blocks) * TREE_BLOCK_TOKENS :]
        return _Page(blocks[-1], None, rest, len(rest), blocks, None if before == self._root_of(event) else before)

    def _place(self, page: _Page, copies: int, *, in_host: bool) -> None:
        """The tiers now have this of a page. Journal the tree blocks that end with it in the fastest tier that does."""
        was, page.copies, page.in_host = page.tier, copies, in_host
        if page.tree_blocks:
            self._tiers.move(page.tree_blocks, page.parent, was, page.tier)

    def _behind(self, parent_key: int | None, event: Any) -> tuple[int | None, _Page | None]:
        """For a page that follows a parent: the hash of the last tree block that ends before it, and the parent."""
        if parent_key is None:
            return self._root_of(event), None
        parent = self._pages.get(parent_key)
        return (None, None) if parent is None else (parent.before, parent)

    def _root_of(self, event: Any) -> int:
        return _root_hash(getattr(event, "lora_name", None) or self.model, salt_of(event))

    def _removed(self, key: int, *, in_host: bool) -> None:
        page = self._pages.get(key)
        if page is None:
            return
        if in_host:
            self._place(page, page.copies, in_host=False)
        else:
            self._place(page, max(0, page.copies - 1), in_host=page.in_host)
        if not page.copies and not page.in_host:
            del self._pages[key]

    def _clear(self) -> None:
        for page in self._pages.values():
            self._place(page, 0, in_host=False)
        self._pages.clear()


def _open_tokens(page: _Page) -> list[int]:
    """The tokens behind the last whole tree block, up to the page's end."""
    pages = [page]
    while (previous := pages[-1].previous) is not None:
        pages.append(previous)
    return [token for part in reversed(pages) for token in part.tokens]


def untold(tree_cache: Any) -> str:
    """What of a tree cache its events do not tell; empty: nothing."""
    kinds = {"sliding windows": tree_cache.supports_swa(), "states": tree_cache.supports_mamba()}
    dropped = " and ".join(kind for kind, present in kinds.items() if present and not tree_cache.disable)
    return dropped and f"where hits can end with {dropped}"


class EventTap:
    """Wraps one tree cache's `take_events`, which empties the queue of events, so that the observer reads them first.

    If SGLang publishes events itself (`published`), they are kept for SGLang. `news` pushes reports to the API server.
    """

    def __init__(
        self, tree_cache: Any, observer: CacheObserver, *, published: bool, news: NewsSender | None = None
    ) -> None:
        self._take = tree_cache.take_events
        self._salts = SaltedEvents(tree_cache)
        self._observer = observer
        self._published = published
        self._news = news
        self._kept: list[Any] = []
        self._leads = False
        tree_cache.take_events = self._take_kept

    def drain(self) -> None:
        events = self._take()
        if events:
            self._observer.observe(self._salts.told(events))
            if self._published:
                self._kept += events

    def tell(self, report: Report, calls: CallsJournal) -> None:
        """Push a report if blocks or `calls` have changed. Called between steps, on the leading rank only."""
        self._leads = True  # `tell_again` is called on every rank
        self.drain()
        if self._news is not None:
            self._news.tell(self._observer.journal.cursor, report, calls.latest)

    def tell_again(self, report: Report, calls: CallsJournal) -> None:
        """As `tell`, before a batch runs. Called on every rank; only the leading one pushes."""
        if self._leads:
            self.tell(report, calls)

    def _take_kept(self) -> list[Any]:
        self.drain()
        events, self._kept = self._kept, []
        return events
