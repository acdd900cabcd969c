"""One engine's cache as the gateway knows it: by the engine's reports, or estimated from the calls placed there.

With reports: a booked call's blocks are expected until a report that was requested after the call's end confirms or
denies them. Without: the blocks count as stored when the call ends, and LRU evicts at the assumed size. The generated
tokens count once the next turn's prompt shows them. The cache is a part of the router's state.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf

import msgspec

from plait.backends.protocol.cache_state import CacheState, StoredRun
from plait.backends.protocol.engine_counts import EngineCounts
from plait.gateway.fleet.booking import Booking, CallUsage
from plait.gateway.fleet.expected_evictions import ExpectedEvictions, Prompt
from plait.gateway.fleet.lookup_sums import LookupSums
from plait.gateway.fleet.others_calls import OthersCalls
from plait.gateway.fleet.tokenizer_agreement import UNKNOWN, Agreement
from plait.policy.costs.engine_view import EngineView
from plait.policy.prefix.block_hash import whole_hash
from plait.policy.prefix.hit_ends import EndRule
from plait.policy.prefix.learned_cache import TELLING, LearnedCache, Reach
from plait.policy.prefix.prefix_tree import Node, PrefixTree
from plait.policy.prefix.resident_blocks import Run
from plait.policy.types import Call

SLO_SCHEDULER = "slo"
"""The local scheduler that serves calls with a TTFT before others, by its name in `local_scheduler.SCHEDULERS`."""


@dataclass(slots=True, eq=False)
class EngineCache:
    """The cache of the engine of `view`, in tree blocks of `block_tokens`."""

    view: EngineView
    block_tokens: int
    kv_tokens: int | None
    """The size of an estimated cache, by the engine or the configuration; None: neither gives it."""
    others: OthersCalls
    answers: EstimatedAnswers
    waiting: Collection[Booking]
    """The sent calls without a first byte, whose prompts are still to be computed."""
    epoch: str | None = None
    cursor: int | None = None
    """With `epoch`, the position in the engine's history since which the next report has the changes."""
    reports: bool | None = None
    """Whether the cache is known by reports; None: not known yet."""
    kind: str | None = None
    """The kind that the reports name. It may be set although `reports` is False: see `agreement`."""
    agreement: Agreement = UNKNOWN
    problem: str | None = None
    """Why an engine with our plugin has no usable report, or gets no token ids."""
    last_report: CacheState | None = None
    report_number: int = 0
    unconfirmed: deque[tuple[float, Node]] = field(default_factory=deque)
    """(end time, prompt's last node) of each ended call, until a report requested after that time."""
    profile_tokens: int | None = None
    """The size of an estimated cache by the configured profile, if `kv_tokens` is None."""
    assumed_tokens: int | None = None
    """The size if `profile_tokens` is None, too; used for nothing else."""
    host_tokens: int | None = None
    """The size of an estimated tier in host memory."""
    call_tokens: float = 0.0
    """The mean length of the calls here, which a cache's size in tokens depends on if the model has several groups."""
    evictions: list[ExpectedEvictions] = field(init=False)
    """What the prompts in `waiting` are expected to evict from each tier."""
    learned: LearnedCache = field(default_factory=LearnedCache)
    """What answers have told of the cache while it was estimated."""
    tells: bool = False
    """Whether answers of an engine without reports have told their cached tokens."""
    sums: LookupSums | None = None
    """The sums in its metrics, until they do."""

    def __post_init__(self) -> None:
        self.evictions = [ExpectedEvictions(self.view.residency, self.block_tokens)]
        self._bound()

    @property
    def told_tokens(self) -> int | None:
        """The size of the cache by the engine or the configuration; None: neither gives it."""
        report = self.last_report
        return self.kv_tokens if report is None else self._tokens(report, report.kv.total_blocks)

    @property
    def free_tokens(self) -> int | None:
        """The tokens that fit into the cache's empty blocks; None without a report."""
        report = self.last_report
        return None if report is None else self._tokens(report, report.kv.free_blocks)

    @property
    def estimated_tokens(self) -> int | None:
        """The size of the cache by the engine, the configuration, or the configured profile; None: not known."""
        return self.told_tokens or self.profile_tokens

    @property
    def likely_tokens(self) -> int | None:
        """`estimated_tokens`, or less by what answers have told."""
        size = self.estimated_tokens
        return size if size is None or self.reports else int(min(1.0, self.learned.fraction) * size)

    def use_size(self, kv_tokens: int) -> None:
        """The engine has given the size of its cache, without a report."""
        self.kv_tokens = kv_tokens
        self._bound()

    def report(self, state: CacheState, requested_s: float, agreement: Agreement, now_s: float) -> bool:
        """Apply a report that was requested at `requested_s` and arrived at `now_s`.

        Returns whether the engine has worked since the last report. Raises ValueError for a report that contradicts
        itself, or has blocks of another size than the tree's. Then the cache is estimated. With another tokenizer than
        the gateway's it is estimated, too, because the report's block names are not those of the gateway's prompts.
        """
        try:
            state.check()
            return self._apply(state, requested_s, agreement, now_s)
        except ValueError:
            self.view.residency.clear()
            self.no_reports()
            raise

    def no_reports(self, problem: str | None = None) -> None:
        """The engine has no usable report. Its cache is estimated from the calls placed there."""
        self.problem = problem
        self.others.clear()
        if self.reports is not False:
            self.view.use_report()
        self.reports, self.cursor, self.epoch, self.kind = False, None, None, None
        self.agreement, self.last_report = UNKNOWN, None
        self.view.residency.use_rule(None)
        self._bound()
        self.report_number += 1
        self._assume_unconfirmed()

    def lost(self) -> None:
        """The engine cannot be reached. It may come back with another tokenizer."""
        self.agreement = UNKNOWN

    def forget(self) -> None:
        """The engine has restarted with an empty cache. Calls are still booked here."""
        self.view.residency.clear()
        while self.unconfirmed:
            self.view.residency.unbook(self.unconfirmed.popleft()[1])
        self.tells, self.sums, self.learned = False, None, LearnedCache()
        self.no_reports()
        self.reports = None

    def ended(self, booking: Booking, usage: CallUsage | None, now_s: float) -> None:
        """A call has ended, so its prefix is stored. If the engine reports, a later report has to confirm this.

        `usage` is set for a complete answer.
        """
        if self.reports:
            self._given_up(booking)
            self.view.residency.touch(booking.leaf)
            self.unconfirmed.append((now_s, booking.leaf))
        else:
            call = booking.call  # if the engine counts the prompt differently, the answer's place is not known
            if usage is not None and call.prompt_hash is not None and usage.prompt_tokens == len(call.tokens) > 0:
                self.answers.ended(self.view.engine_id, call.prompt_hash, call, usage.output_tokens)
            if usage is not None:
                self.tells = usage.cached_tokens is not None
            if usage is not None and usage.cached_tokens is not None:
                self.sums = None
                difference = usage.cached_tokens - booking.placement.cached_tokens
                if self.learned.is_sure and abs(difference) < TELLING * self.block_tokens:
                    self.learned.agreed += booking.placement.cached_tokens > 0  # the usual case: no function call
                else:
                    self._found(booking, usage.cached_tokens * call.prompt_tokens / max(1, usage.prompt_tokens), now_s)
            self.view.residency.assume_stored(booking.leaf, is_booked=True)
            lowest, views = self.view.tiers.lowest, self.view.tiers.views
            if lowest.most_blocks is not None:
                blocks, room = lowest.resident.blocks, views[-1] if views else self.view
                is_half_full = 2 * blocks >= lowest.most_blocks
                room.free_tokens = float((lowest.most_blocks - blocks) * self.block_tokens) if is_half_full else None

    def counted(self, counts: EngineCounts | None, before: EngineCounts | None, now_s: float) -> None:
        """An engine without reports has counted again, after the counts of `before`; None: it does not count."""
        if self.tells or counts is None or counts.looked_up is None or before is None or before.looked_up is None:
            self.sums = None
            return
        looked_up, found = counts.looked_up - before.looked_up, counts.found - before.found
        if self.sums is None or min(looked_up, found) < 0:  # it has restarted
            self.sums = LookupSums()
            return
        for booking, tokens in self.sums.grew(looked_up, found):
            self._found(booking, tokens, now_s)

    def _found(self, booking: Booking, tokens: float, now_s: float) -> None:
        """The engine has found this much of a call's prompt in its cache."""
        size = self.estimated_tokens or self.assumed_tokens
        if self.reports or size is None:
            return
        blocks = min(tokens / self.block_tokens, booking.call.cacheable_blocks)
        predicted = booking.placement.cached_tokens // self.block_tokens
        reach, is_bound = booking.reach or Reach(predicted, 0, 0, predicted), self.told_tokens is not None
        self.learned.saw(reach, blocks, size // self.block_tokens, booking.booked_s, now_s, is_bound=is_bound)
        self.view.tiers.lowest.mark(booking.leaf, ceil(blocks), 2, reach.found)
        self._bound()

    def computed(self, booking: Booking) -> None:
        """A call's prompt is computed."""
        for evictions in self.evictions:
            evictions.computed(booking)

    def given_up(self, booking: Booking) -> None:
        """A call will not be computed, or not to its end: expect none of its blocks."""
        if self.reports:
            self._given_up(booking)
        elif self.sums is not None:
            with suppress(ValueError):
                self.sums.open.remove(booking)
        self.view.residency.unbook(booking.leaf, waits=booking.sent_s == inf)

    def _given_up(self, booking: Booking) -> None:
        for evictions in self.evictions:
            evictions.given_up(booking)

    def _tokens(self, state: CacheState, blocks: int) -> int:
        """How many tokens fit into engine blocks, with calls of the mean length here."""
        return state.kv.tokens(blocks, state.block_tokens, self.call_tokens)

    def _use_tiers(self, names: Sequence[str]) -> None:
        tiers = self.view.tiers
        if (names or tiers.views) and names != tiers.names:
            for evictions in self.evictions:
                evictions.end()
            tiers.use(names)
            of_each = (tiers.device, *(view.residency for view in tiers.views))
            self.evictions = [ExpectedEvictions(one, self.block_tokens) for one in of_each]

    def _apply(self, state: CacheState, requested_s: float, agreement: Agreement, now_s: float) -> bool:
        if state.granularity_tokens != self.block_tokens:
            raise ValueError(
                f"engine {self.view.engine_id} reports its cache in blocks of {state.granularity_tokens} tokens, "
                f"but the prefix tree has blocks of {self.block_tokens}; its cache is estimated instead"
            )
        last, was_estimated = self.last_report, self.kind is not None and not self.reports
        problem = agreement.problem
        if problem is None and state.untold:
            problem = f"the engine does not tell {state.untold}: its cache is estimated"
        if state.kv.groups:
            self.call_tokens = self.view.ledger.mean_call_tokens or self.call_tokens
        if state.epoch != self.epoch:
            self.others.clear()
        if problem is not None:
            self._estimate(state)
        elif was_estimated and not state.snapshot:
            self.cursor = self.epoch = None  # earlier changes were not applied, so ask for a snapshot next
        else:
            self._take_blocks(state, requested_s)
        self.sums = None
        self.kind, self.agreement, self.problem = state.kind, agreement, problem
        scheduler = state.scheduler
        self.view.use_report(
            state.iteration.budget_tokens, urgent_first=scheduler.policy == SLO_SCHEDULER, slots=scheduler.slots
        )
        if state.calls is not None:
            snapshot, blocks = state.snapshot, problem is None
            self.others.apply(state.calls, state.ended, now_s, snapshot=snapshot, blocks=blocks)
        self.last_report = msgspec.structs.replace(state, stored=[], removed=[], calls=None, ended=[], ends=None)
        self._bound()
        self.report_number += 1
        return last is None or bool(state.stored or state.removed) or state.iteration != last.iteration

    def _take_blocks(self, state: CacheState, requested_s: float) -> None:
        """Apply what the engine has stored and removed."""
        residency = self.view.residency
        self._use_tiers([one.tier for one in state.tiers])
        if state.epoch != self.epoch:
            self.view.tiers.forget_loads()
        if state.snapshot or state.epoch != self.epoch:
            residency.clear()
        runs, told = [(run.parent, run.hashes) for run in state.stored], state.ends
        residency.use_rule(
            None if told is None else EndRule(told.align_tokens, told.interval_tokens, self.block_tokens)
        )
        if state.tiers:
            self._take_tiers(state, runs)
        else:
            residency.resident.apply(state.removed, runs)
        if told is not None and residency.ends is not None:
            residency.ends.apply(told.opened, told.inside, told.closed, residency.resident.finder())
            residency.ends.confirm(requested_s)
        self.reports, self.epoch, self.cursor = True, state.epoch, state.cursor
        self.view.free_tokens = free_tokens = float(self._tokens(state, state.kv.free_blocks))
        while self.unconfirmed and self.unconfirmed[0][0] <= requested_s:
            residency.unbook(self.unconfirmed.popleft()[1])
        prompts: dict[object, Prompt] = {
            booking: (booking.leaf, booking.call.prompt_tokens) for booking in self.waiting
        }
        lower = (inf if tier.free_tokens is None else tier.free_tokens for tier in self.view.tiers.views)
        rooms = (free_tokens, *lower)
        for evictions, free_tokens in zip(self.evictions, rooms, strict=True):
            evictions.update(free_tokens, prompts)

    def _take_tiers(self, state: CacheState, runs: Sequence[Run]) -> None:
        """Apply what all tiers have stored and removed; the accelerator has stored these `runs`.

        A tier's residency includes the faster tiers. So a block that moves to a lower tier stays resident below, and
        `left` collects the blocks that a faster tier no longer has: they moved, or are gone.
        """
        free_tokens = float(self._tokens(state, state.kv.free_blocks))
        left, above = set[int](), self.view.residency.resident
        ends = above.apply(state.removed, runs, left)
        removed, stored = set(state.removed), {block for _, hashes in runs for block in hashes}
        for view, tier in zip(self.view.tiers.views, state.tiers, strict=True):
            resident = view.residency.resident
            removed.update(tier.removed)
            stored.update(block for run in tier.stored for block in run.hashes)
            resident.cover(above, ends)
            fresh = [part for run in tier.stored for part in _without(run, left)]
            ends += resident.apply(removed - stored, _parents_first(fresh), left)
            above = resident
            view.total_tokens = self._tokens(state, tier.total_blocks)
            free_tokens += inf if tier.free_blocks is None else self._tokens(state, tier.free_blocks)
            view.free_tokens = None if free_tokens == inf else free_tokens
            view.took(tier.loaded_tokens, tier.loading_s)

    def _estimate(self, state: CacheState) -> None:
        """Estimate the cache of an engine whose block names differ. After a restart the cache is empty."""
        if state.epoch != self.epoch:
            self.view.residency.clear()
        self.view.residency.use_rule(None)
        self.reports, self.epoch, self.cursor = False, state.epoch, state.cursor
        self._assume_unconfirmed()

    def _assume_unconfirmed(self) -> None:
        """Change to an estimated cache: take unconfirmed prefixes as stored, and expect no evictions."""
        self.view.free_tokens = None
        for tier in self.view.tiers.views:
            tier.free_tokens = None
        for evictions in self.evictions:
            evictions.end()
        while self.unconfirmed:
            self.view.residency.assume_stored(self.unconfirmed.popleft()[1], is_booked=True)

    def _bound(self) -> None:
        """Update the sizes of the residencies."""
        tokens, residency = self.estimated_tokens or self.assumed_tokens, self.view.residency
        fraction = self.learned.fraction
        if self.told_tokens is not None:
            fraction = min(1.0, fraction)  # it may have been learned before the size was told
        residency.most_blocks = None if tokens is None else int(fraction * tokens) // self.block_tokens
        if not self.reports and self.host_tokens is not None and tokens is not None:
            self._use_tiers(["host"])
            tier = self.view.tiers.views[0]
            tier.total_tokens = self.host_tokens
            tier.residency.most_blocks = int(fraction * (tokens + self.host_tokens)) // self.block_tokens
        elif not self.reports:
            self._use_tiers([])
        for one in (residency, *residency.tiers):
            one.finds_nothing = not self.reports and self.learned.finds_nothing


def _without(run: StoredRun, blocks: Container[int]) -> Iterator[Run]:
    """The parts of a run between these blocks."""
    parent, part = run.parent, list[int]()
    for block in run.hashes:
        if block not in blocks:
            part.append(block)
            continue
        if part:
            yield parent, part
        parent, part = block, []
    if part:
        yield parent, part


def _parents_first(runs: Sequence[Run]) -> Sequence[Run]:
    """Each run behind the one with its parent. Engines evict a prompt's end first, so a lower tier has it earlier."""
    if len(runs) < 2:
        return runs
    run_of = {block: index for index, (_, hashes) in enumerate(runs) for block in hashes}
    ordered, seen = list[Run](), set[int]()
    for index in range(len(runs)):
        path = list[int]()
        at: int | None = index
        while at is not None and at not in seen:
            seen.add(at)
            path.append(at)
            parent = runs[at][0]
            at = None if parent is None else run_of.get(parent)
        ordered += (runs[one] for one in reversed(path))
    return ordered


class EstimatedAnswers:
    """Adds generated tokens to the estimated caches of a fleet. Reports have the generated blocks already.

    `cache_of` returns an engine's cache.
    """

    def __init__(self, cache_of: Callable[[str], EngineCache], tree: PrefixTree, block_tokens: int) -> None:
        self._cache_of = cache_of
        self._tree = tree
        self._block_tokens = block_tokens
        self.answered = AnsweredPrompts(block_tokens)

    def ended(self, engine_id: str, prompt_hash: int, call: Call, output_tokens: int) -> None:
        """A call was answered. The engine and the gateway count the same tokens in its prompt."""
        before = call.block_hashes[-1] if call.block_hashes else None
        self.answered.add(engine_id, prompt_hash, before, call.tokens, output_tokens)

    def arrived(
        self, tokens: Sequence[int], hashes: Sequence[int], root: int, turn_ends: AbstractSet[int] | None
    ) -> None:
        """A prompt arrived. If it continues an answered one, engines that still have that prompt have the answer too.

        The arguments are those of `AnsweredPrompts.continued`. Without `answered` prompts, this call has no effect.
        """
        blocks, stored = self.answered.continued(tokens, hashes, root, turn_ends)
        for engine_id, stored_tokens in stored.items():
            self._store(self._cache_of(engine_id), hashes[: stored_tokens // self._block_tokens], blocks)

    def forget(self, engine_id: str) -> None:
        """The engine has restarted or is gone."""
        self.answered.forget(engine_id)

    def _store(self, cache: EngineCache, hashes: Sequence[int], known_blocks: int) -> None:
        """Take all blocks as stored in the fastest tier that has the first `known_blocks`."""
        device, path = cache.view.residency, self._tree.match(hashes)
        for one in () if cache.reports else (device, *device.tiers):
            if known_blocks <= one.reach(path).anywhere < len(hashes):
                one.assume_stored(self._tree.insert(hashes), is_booked=False)
                return


MOST_PROMPTS = 16_384
"""The most remembered prompts, some 6 MB. A turn that comes after this many others is not recognised."""


@dataclass(slots=True)
class _Answered:
    """An answered prompt: the hash of its whole blocks (None: it has none), the number of tokens after them, its last
    token, and by engine the tokens of prompt and answer that it has stored.
    """

    before: int | None
    end: tuple[int, int]
    stored_tokens: dict[str, int] = field(default_factory=dict)


class AnsweredPrompts:
    """The latest prompts that engines have answered, by their `whole_hash`.

    An engine's cache has the answer's tokens, too. The gateway learns their ids from the next turn's prompt, which
    begins with the whole prompt of the turn before, followed by the answer.
    """

    def __init__(self, block_tokens: int, most_prompts: int = MOST_PROMPTS) -> None:
        self._block_tokens = block_tokens
        self._most_prompts = most_prompts
        self.prompts: OrderedDict[int, _Answered] = OrderedDict()
        self._ends: dict[int | None, Counter[tuple[int, int]]] = {}
        """By the hash of the whole blocks: (number of tokens after them, last token), with how many prompts have each.

        Chats end alike, so few places of a new prompt can be the end of an answered one.
        """

    def add(
        self, engine_id: str, prompt_hash: int, before: int | None, tokens: Sequence[int], output_tokens: int
    ) -> None:
        """An engine has answered the prompt of these `tokens`. The KV of the last generated token is not computed."""
        answered = self.prompts.get(prompt_hash)
        if answered is None:
            end = len(tokens) % self._block_tokens, tokens[-1]
            answered = self.prompts[prompt_hash] = _Answered(before, end)
            self._ends.setdefault(before, Counter())[end] += 1
            if len(self.prompts) > self._most_prompts:
                self._forget(next(iter(self.prompts)))
        self.prompts.move_to_end(prompt_hash)
        answered.stored_tokens[engine_id] = len(tokens) + max(0, output_tokens - 1)

    def continued(
        self, tokens: Sequence[int], hashes: Sequence[int], root: int, turn_ends: AbstractSet[int] | None
    ) -> tuple[int, Mapping[str, int]]:
        """(whole blocks of the answered prompt that this one continues, stored tokens by engine).

        `hashes` are those of the new prompt's whole blocks, after `root`. With `turn_ends`, one of these tokens has to
        be where the answer ended. Otherwise the prompt has another text there, such as the answer without its
        reasoning.
        """
        for blocks in range(len(hashes), -1, -1):
            before = hashes[blocks - 1] if blocks else None
            ends = self._ends.get(before)
            if ends is None:
                continue
            start = blocks * self._block_tokens
            first = max(0, start - 1)
            lasts = tokens[first : min(start + self._block_tokens, len(tokens)) - 1]
            for rest_tokens, _ in sorted(ends.keys() & enumerate(lasts, first + 1 - start), reverse=True):
                rest = tokens[start : start + rest_tokens]
                answered = self.prompts.get(whole_hash(rest, root if before is None else before))
                if answered is not None:
                    stored = answered.stored_tokens.items()
                    return blocks, {
                        engine_id: min(end, len(tokens))
                        for engine_id, end in stored
                        if turn_ends is None or not turn_ends.isdisjoint(tokens[end : end + 2])
                    }
        return 0, {}

    def forget(self, engine_id: str) -> None:
        """The engine has restarted or is gone."""
        for prompt_hash, answered in list(self.prompts.items()):
            answered.stored_tokens.pop(engine_id, None)
            if not answered.stored_tokens:
                self._forget(prompt_hash)

    def _forget(self, prompt_hash: int) -> None:
        answered = self.prompts.pop(prompt_hash)
        ends = self._ends[answered.before]
        ends[answered.end] -= 1
        if not ends[answered.end]:
            del ends[answered.end]
            if not ends:
                del self._ends[answered.before]
