"""A plan's limits on SGLang's prefill pass: the most tokens of each prompt, and whether a prompt may be cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from plait.backends.adapter.required_names import load

if TYPE_CHECKING:

    class _SglangAdder:
        """The parts of SGLang's PrefillAdder that the limits below use."""

        page_size: int
        rem_chunk_tokens: int | None
        chunked_req_limit: int | None
        new_chunked_req: Any

        def add_chunked_req(self, req: Any) -> Any: ...

        def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any: ...

        def ceil_paged_tokens(self, tokens: int) -> int: ...

        def budget_state(self) -> Any: ...

else:
    _SglangAdder = object


@dataclass(frozen=True, slots=True)
class PrefillPass:
    """`limits` has the most tokens of some requests, by request id. `may_cut` says whether a prompt may begin in part.

    SGLang tracks only one prompt in chunks. While that prompt is held back, no other prompt may be cut.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    may_cut: bool = True


NO_LIMITS = PrefillPass()


class LimitedAdder(_SglangAdder):
    """Comes before SGLang's adder in the method resolution order. `plait_pass` has the plan's limits."""

    plait_pass = NO_LIMITS

    def add_chunked_req(self, req: Any) -> Any:
        """Add the next chunk of the prompt in chunks. It ends where a page ends, unless the limit is below a page.

        A limit that is all the room there is limits nothing: SGLang then cuts the prompt as it always does.
        """
        limit, room = self.plait_pass.limits.get(req.rid), self.rem_chunk_tokens
        if limit is not None and (room is None or limit < room):
            end = (req.prefix_len + limit) // self.page_size * self.page_size
            limit = end - req.prefix_len if end > req.prefix_len else limit
            self.chunked_req_limit = min(limit, self.chunked_req_limit or limit)
        return super().add_chunked_req(req)

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
        """Admit a request, up to its limit. Skip it if it must be cut while another prompt is cut already."""
        room = self.rem_chunk_tokens
        if room is None:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        limit = min(room, max(self.page_size, self.plait_pass.limits.get(req.rid, room)))
        uncached = len(req.full_untruncated_fill_ids) - req.prefix_len
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
