"""SGLang's scheduler with our hooks. The plugin puts it in the place of SGLang's in each rank's process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import msgspec

from plait.backends.adapter.required_names import Missing, UnsupportedEngineError, load
from plait.backends.adapter.scheduler_settings import SglangSettings, read_settings
from plait.backends.protocol.cache_state import Tier
from plait.backends.sglang.cache_state import CacheObserver, EventTap, untold
from plait.backends.sglang.channel import STATE_KEY, NewsSender, ReportSince, SchedulerQuery, parse_queries
from plait.backends.sglang.compatibility import REQUIRED, abort_in_chunks, complete, rank_of, send_ticks, started_with
from plait.backends.sglang.driver import SglangDriver
from plait.backends.sglang.host_tier import host_tier
from plait.backends.sglang.levers import limited
from plait.backends.sglang.step_clock import Tick

_Hooked: Any = object
"""SGLang's scheduler, behind the hooks in the method resolution order."""


class PlannedSglangScheduler(_Hooked):  # type: ignore[misc]
    """Hooks that come before SGLang's scheduler in the method resolution order. `plait` is the driver."""

    plait_lacks: Missing | None = None
    """The names that SGLang lacks, found before the hooks replaced its methods. None: no hook has yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.attach(read_settings())

    def attach(self, settings: SglangSettings) -> None:
        """Begin to plan for this scheduler. Raises UnsupportedEngineError if that is not possible."""
        complete(self, super())
        tier = REQUIRED.scheduler_tier(self, settings.lowest_tier, self.plait_lacks)
        _check_options(self, super(), tier)
        self.plait = _driver(self, settings, tier)
        send_ticks(self, super(), self.plait.tick)

    def _poll_timeout_aborts(self) -> list[Any]:
        """Add the leading rank's tick to the requests of a step, which all ranks get. Older versions: `send_ticks`."""
        tick = self.plait.tick()
        added: list[Any] = super()._poll_timeout_aborts()
        return added if tick is None else [*added, tick]

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """A step's requests have arrived, with the tick among them."""
        ticks = [request for request in recv_reqs if isinstance(request, Tick)]
        self.plait.ticked(ticks)
        super().process_input_requests([request for request in recv_reqs if not isinstance(request, Tick)])

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        """A request begins to wait, for the first time or after a preemption."""
        self.plait.queued(req)
        super()._add_request_to_queue(req, is_retracted)

    def get_new_batch_prefill(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule prompts, with decodes mixed in. Without prompts, SGLang runs the decodes alone."""
        if self.plait.planner is None:
            return super().get_new_batch_prefill(*args, **kwargs)
        (running_batch,) = (*args, *kwargs.values()) or (self.running_batch,)
        return self.plait.step(running_batch, partial(super().get_new_batch_prefill, *args, **kwargs))

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.plait.begins(batch)
        return super().run_batch(batch, *args, **kwargs)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.plait.ended(batch)

    def abort_request(self, recv_req: Any) -> None:
        """End requests from outside, for example after a client has gone."""
        super().abort_request(recv_req)
        abort_in_chunks(self, super(), recv_req)
        self.plait.given_up()

    def process_pending_chunked_abort(self) -> None:
        """End a request that was aborted while its prompt was in chunks. No batch has this request any more."""
        aborted = self._pending_chunked_abort_req
        super().process_pending_chunked_abort()
        if aborted is not None and aborted.finished():
            self.plait.aborted(aborted)

    def send_abort_output(self, abort_req: Any, req: Any) -> None:
        """End a request that is refused, for example because there is no room. SGLang calls this since 0.5.23."""
        super().send_abort_output(abort_req, req)
        self.plait.aborted(req)

    def get_internal_state(self, recv_req: Any) -> Any:
        """SGLang's own state, or the answers to Plait's queries (`channel`)."""
        queries = parse_queries(recv_req.rid)
        if queries is None:
            return super().get_internal_state(recv_req)
        answers = [self._answer(query) for query in queries]
        return load("sglang.srt.managers.io_struct.GetInternalStateReqOutput")(internal_state={STATE_KEY: answers})

    def _answer(self, query: SchedulerQuery) -> bytes | int | None:
        """None: the query is for another data-parallel rank."""
        if query.rank != self.plait.rank:
            return None
        if isinstance(query, ReportSince):
            return msgspec.msgpack.encode(self.plait.report(query.since, query.epoch, query.gateway))
        return self.plait.change_objectives(query.body.encode())


class _LimitsAdder(_Hooked):  # type: ignore[misc]
    """The hook of the adder that admits requests in one prefill pass."""

    plait: SglangDriver

    def get_prefill_adder_class(self) -> Any:
        adder = super().get_prefill_adder_class()
        return limited(adder, self.plait.prefill_pass) if self.plait.cuts else adder


@cache
def scheduler_class(base: type) -> Any:
    """SGLang's scheduler class, with our hooks."""
    limits = (_LimitsAdder,) if hasattr(base, "get_prefill_adder_class") else ()
    return type(f"Planned{base.__name__}", (PlannedSglangScheduler, *limits, base), {})


def _check_options(scheduler: Any, stock: Any, tier: Tier) -> None:
    """Raise UnsupportedEngineError for options that Plait does not support in a tier."""
    parallel = started_with("parallel", scheduler.server_args)
    shares_ticks = not hasattr(stock, "_poll_timeout_aborts")  # all data-parallel ranks would get those of the first
    refused = {
        "--pp-size above 1": parallel.pp_size > 1,
        "--enable-dp-attention before SGLang 0.5.20": shares_ticks and parallel.enable_dp_attention,
        "disaggregated prefill and decode": scheduler.disaggregation_mode.value != "null",
        **({} if tier == "reports" else _options_of_order(scheduler)),
    }
    found = [option for option, present in refused.items() if present]
    if found:
        raise UnsupportedEngineError(
            f"Plait does not support {'; '.join(found)}. Start SGLang without it, or without Plait "
            "(python -m sglang.launch_server)."
        )


def _options_of_order(scheduler: Any) -> dict[str, bool]:
    """The options with which Plait does not schedule, and whether each is set."""
    fcfs = load("sglang.srt.managers.schedule_policy.CacheAgnosticPolicy.FCFS")
    return {
        "diffusion language models": scheduler.dllm_config is not None,
        "hierarchical sparse attention": scheduler.hisparse_coordinator is not None,
        "chunked prefill turned off (--chunked-prefill-size -1)": not scheduler.chunked_prefill_size,
        "--schedule-policy other than fcfs (Plait orders the calls itself)": scheduler.policy.policy is not fcfs,
        "--enable-priority-scheduling (Plait orders the calls itself)": bool(scheduler.enable_priority_scheduling),
    }


def _driver(scheduler: Any, settings: SglangSettings, tier: Tier) -> SglangDriver:
    model = started_with("serving", scheduler.server_args).served_model_name
    observer = CacheObserver(page_tokens=scheduler.page_size, model=model, untold=untold(scheduler.tree_cache))
    published = scheduler.kv_events_publisher.enable_kv_cache_events
    events = EventTap(scheduler.tree_cache, observer, published=published, news=NewsSender(rank=rank_of(scheduler)))
    host = host_tier(scheduler.tree_cache, observer.host, scheduler.page_size)
    lower = () if host is None else (host,)
    release = load("sglang.srt.managers.schedule_batch.release_req")
    return SglangDriver(scheduler, observer, events, settings, release=release, tier=tier, lower=lower)
