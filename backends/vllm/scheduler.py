"""The scheduler for vLLM's `--scheduler-cls`: vLLM's own, synchronous or asynchronous, which follows Plait's plans."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from plait.backends.adapter.required_names import UnsupportedEngineError, load
from plait.backends.vllm import plugin
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.compatibility import REQUIRED
from plait.backends.vllm.driver import Driver, served_model
from plait.backends.vllm.settings import parse_settings

if TYPE_CHECKING:

    class _VllmScheduler:
        """The parts of vLLM's scheduler that the hooks below use."""

        vllm_config: Any
        kv_cache_config: Any
        kv_cache_manager: Any
        waiting: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...

        def add_request(self, request: Any) -> None: ...

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any: ...

        def finish_requests(self, *args: Any, **kwargs: Any) -> Any: ...

        def get_request_counts(self) -> tuple[int, int]: ...

        def _preempt_request(self, *args: Any, **kwargs: Any) -> None: ...

        def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int: ...

else:
    _VllmScheduler = object


class PlannedScheduler(_VllmScheduler):
    """Hooks that come before vLLM's scheduler in the method resolution order. `plait` is the Driver."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        self.plait = _driver(self)
        self.cache_reports = plugin.CacheReports(self.plait)

    def add_request(self, request: Any) -> None:
        """A request has arrived from the API server."""
        self.plait.received(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule an iteration. The arguments are vLLM's."""
        output = self.plait.step(lambda: super(PlannedScheduler, self).schedule(*args, **kwargs))
        self.cache_reports.publish()
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Process an iteration's output."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        self.plait.ended(scheduler_output, outputs)
        self.cache_reports.publish()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside, for example after a client has gone."""
        ended = super().finish_requests(*args, **kwargs)
        self.plait.given_up()
        return ended

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests, including waiting requests that are held back."""
        running, waiting = super().get_request_counts()
        return running, waiting + len(self.plait.levers.hidden)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.plait.preemptions += 1
        super()._preempt_request(*args, **kwargs)

    def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int:
        """Limit a request's tokens in an iteration; 0 skips a running request."""
        limits = self.plait.levers.limits
        if limits:  # usually there are none; this runs for each request of each iteration
            new = min(new, limits.get(request.request_id, new))
        return super()._reserve_prefill_lookahead(request, computed, new)


def create_scheduler(*args: Any, **kwargs: Any) -> Any:
    """Build the scheduler with vLLM's arguments. Raises UnsupportedEngineError or SettingsError."""
    REQUIRED.check_installed()
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if getattr(vllm_config, "diffusion_config", None) is not None:
        raise UnsupportedEngineError("Plait does not schedule diffusion models; start vLLM without Plait")
    plugin.install()
    return scheduler_class(asynchronous=vllm_config.scheduler_config.async_scheduling)(*args, **kwargs)


@cache
def scheduler_class(*, asynchronous: bool) -> Any:
    """The scheduler class of the installed vLLM, with our hooks."""
    base = load(f"vllm.v1.core.sched.{'async_scheduler.Async' if asynchronous else 'scheduler.'}Scheduler")
    return type(f"Planned{base.__name__}", (PlannedScheduler, base), {})


def _check(scheduler: Any) -> None:
    REQUIRED.check_scheduler(scheduler)
    if not isinstance(scheduler.waiting, load("vllm.v1.core.sched.request_queue.FCFSRequestQueue")):
        raise UnsupportedEngineError("Plait orders the calls itself; start vLLM with --scheduling-policy fcfs")
    if not scheduler.kv_cache_config.kv_cache_groups:
        raise UnsupportedEngineError("Plait does not schedule models without a KV cache; start vLLM without Plait")


def _driver(scheduler: Any) -> Driver:
    manager, config = scheduler.kv_cache_manager, scheduler.vllm_config
    group_id = _observed_group(scheduler.kv_cache_config.kv_cache_groups)
    observer = PoolObserver(
        manager.block_pool,
        group_id=group_id,
        block_tokens=manager.coordinator.single_type_managers[group_id].block_size,
        model=served_model(config),
    )
    settings = parse_settings(config.additional_config)
    return Driver(scheduler, observer, settings, statuses=load("vllm.v1.request.RequestStatus"))


def _observed_group(groups: Any) -> int:
    """The first KV cache group with full attention: its content bounds what a prefix hit can reuse."""
    spec = load("vllm.v1.kv_cache_interface.FullAttentionSpec")
    full = [number for number, group in enumerate(groups) if isinstance(group.kv_cache_spec, spec)]
    return full[0] if full else 0
