"""The levers of SGLang's scheduler: the state that a plan sets for one prefill pass, and preemption.

SGLang has room for one prompt in chunks: a prompt of which only a part is computed. Most rules below follow from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from plait.backends.adapter.required_names import load
from plait.backends.sglang.calls import SglangCall
from plait.backends.sglang.compatibility import add_limited_chunk, has_beams, prefix_tokens, releasing
from plait.policy.scheduling.plan import EngineFacts, Plan

_Hooked: Any = object
"""SGLang's PrefillAdder, behind our limits in the method resolution order."""


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """A plan's limits on one prefill pass: the most tokens of some requests, by request id.

    `may_cut` says whether a prompt may begin in part: not while the plan lets the prompt in chunks wait.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    may_cut: bool = True


NO_LIMITS = PrefillPass()


class LimitedAdder(_Hooked):  # type: ignore[misc]
    """Comes before SGLang's adder in the method resolution order. `plait_pass` has the plan's limits."""

    plait_pass = NO_LIMITS
    rem_chunk_tokens: int | None

    def add_chunked_req(self, req: Any) -> Any:
        """Add the next chunk of the prompt in chunks. The chunk ends with a page, unless the limit is less than a page.

        A limit of at least the room in the batch has no effect: SGLang cuts the prompt at the end of the room.
        """
        limit, room = self.plait_pass.limits.get(req.rid), self.rem_chunk_tokens
        if limit is not None and (room is None or limit < room):
            prefix = prefix_tokens(req)
            end = (prefix + limit) // self.page_size * self.page_size
            return add_limited_chunk(self, super().add_chunked_req, req, end - prefix if end > prefix else limit)
        return super().add_chunked_req(req)

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        """Admit a request, up to its limit. Skip it if it must be cut while another prompt is cut already."""
        room = self.rem_chunk_tokens
        if room is None:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        limit = min(room, max(self.page_size, self.plait_pass.limits.get(req.rid, room)))
        uncached = len(req.full_untruncated_fill_ids) - prefix_tokens(req)
        cut_already = has_chunked_req or self.new_chunked_req is not None or not self.plait_pass.may_cut
        if cut_already and self.ceil_paged_tokens(uncached) > limit:
            return _results().CONTINUE
        self.rem_chunk_tokens = limit
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        self.rem_chunk_tokens += room - limit
        if limit < room and result is _results().OTHER:  # the request has reached its own limit; there is still room
            return self.budget_state()
        return result


def limited(base: type, allowed: PrefillPass) -> Callable[..., Any]:
    """A factory of SGLang's adder class, or of a class derived from it, with our limits."""

    def make(*args: Any, **kwargs: Any) -> Any:
        adder = _limited_class(base)(*args, **kwargs)
        adder.plait_pass = allowed
        return adder

    return make


@cache
def _limited_class(base: type) -> Any:
    return type(f"Limited{base.__name__}", (LimitedAdder, base), {})


@cache
def _results() -> Any:
    return load("sglang.srt.managers.schedule_policy.AddReqResult")


@dataclass(frozen=True, slots=True)
class SglangLevers:
    picks: Sequence[tuple[SglangCall, int]] = ()
    """The plan's prompts, and the tokens of each."""
    shown: Sequence[SglangCall] = ()
    """The waiting calls that SGLang sees, in order."""
    goes_on: bool = False
    """Whether the prompt in chunks continues."""
    prompt_tokens: int = 0
    """The most prompt tokens of the pass."""
    decodes: bool = True
    """Whether decodes run too."""
    limits: PrefillPass = NO_LIMITS


def levers_of(
    plan: Plan, in_chunks: SglangCall | None, facts: EngineFacts, page_tokens: int, *, cuts: bool = True
) -> SglangLevers:
    """The levers of a plan. `in_chunks` is the running call whose prompt is computed in chunks.

    SGLang counts a prompt's tokens in whole pages. While the prompt in chunks waits, no other prompt can be cut. If all
    others would have to be cut, the prompt in chunks goes on instead, or nothing would run. Without `cuts` there are no
    limits, and SGLang could cut a second prompt, so the prompt in chunks goes on whenever a prompt runs.
    """
    picks = cast("Sequence[tuple[SglangCall, int]]", plan.picks)
    backfill = cast("Sequence[SglangCall]", plan.backfill)
    prompts, decode_tokens = [], 0
    for call, tokens in picks:
        if call.waits or call is in_chunks:
            prompts.append((call, tokens))
        else:
            decode_tokens += tokens
    more = [call for call in backfill if call.waits or call is in_chunks]
    decodes = len(prompts) + len(more) < len(picks) + len(backfill)
    tokens = sum(-(-tokens // page_tokens) * page_tokens for _, tokens in prompts)
    if more:
        budget_tokens = facts.max_batch_tokens if plan.budget_tokens is None else plan.budget_tokens
        tokens = max(tokens, min(budget_tokens, facts.max_batch_tokens) - decode_tokens)
    if tokens <= 0:
        return SglangLevers(decodes=decodes)
    named = [*(call for call, _ in prompts), *more]
    limits = {call.call_id: tokens for call, tokens in prompts if tokens < _wanted(call, facts)}
    shown = [call for call in named if call.waits]
    fits = any(call.call_id not in limits and _wanted(call, facts) <= tokens for call in shown)
    goes_on = in_chunks is not None and (in_chunks in named or not fits or not cuts)
    return SglangLevers(
        picks=prompts,
        shown=shown,
        goes_on=goes_on,
        prompt_tokens=tokens,
        decodes=decodes,
        limits=PrefillPass(limits, may_cut=in_chunks is None or goes_on) if cuts else NO_LIMITS,
    )


def _wanted(call: SglangCall, facts: EngineFacts) -> int:
    return call.uncomputed_tokens - (facts.cached_tokens(call) if call.waits else 0)


def preempt(scheduler: Any, running_batch: Any, victims: Iterable[Any], release: Callable[..., Any]) -> list[Any]:
    """Free the blocks of the victims that can start anew. Returns these victims; the caller queues them again.

    `release` is SGLang's `release_req`, which frees a request's resources.
    """
    victims = [request for request in victims if _can_start_anew(request)]
    if not victims:
        return []
    ids = {id(request) for request in victims}
    staying = [index for index, request in enumerate(running_batch.reqs) if id(request) not in ids]
    release_decode = releasing(running_batch.release_req, scheduler)
    for index, request in enumerate(running_batch.reqs):
        if id(request) in ids:
            release_decode(index, len(staying))
    if len(staying) < len(running_batch.reqs):
        running_batch.filter_batch(keep_indices=staying)
        running_batch.batch_is_full = False
    if id(scheduler.chunked_req) in ids:
        releasing(release, scheduler)(
            req=scheduler.chunked_req,
            remaing_req_count=len(staying),
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler.chunked_req = None
    return victims


def _can_start_anew(request: Any) -> bool:
    """Whether SGLang can compute a request again from its tokens."""
    return not has_beams(request) and request.input_embeds is None and request.session is None
