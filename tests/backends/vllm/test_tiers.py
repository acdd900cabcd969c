"""The adapter in a vLLM that lacks some names starts with the highest tier that needs none of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.adapter.scheduler_settings import SettingsError
from plait.backends.protocol.cache_state import KvGroup
from plait.backends.vllm import plugin
from plait.backends.vllm.driver import VllmDriver
from plait.backends.vllm.scheduler import kv_groups
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from plait.policy.types import Slo
from tests.backends.vllm import fake_package
from tests.backends.vllm.fake_package import BUDGET_TOKENS, Queue, RequestStatus, Scheduler, build, send
from tests.backends.vllm.fake_pool import Pool

OF_CHUNKS = ("_preempt_request", "_reserve_prefill_lookahead")
OF_ORDER = ("get_request_counts",)


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_package.install(monkeypatch)
    monkeypatch.setattr(plugin, "install", lambda: None)


class Own:
    """Admits the latest call first, gives each 10 tokens of 30, and holds or preempts those that run."""

    preempts = False

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s, facts
        picks = tuple((call, 10) for call in reversed(waiting))
        return Plan(tuple(running) if self.preempts else (), picks, budget_tokens=30)


class Preempting(Own):
    preempts = True


def step(scheduler: Any) -> dict[str, int]:
    scheduled: dict[str, int] = scheduler.schedule().num_scheduled_tokens
    return scheduled


def tier(scheduler: Any) -> tuple[str, str]:
    state = scheduler.plait.report(None, None).scheduler
    return state.tier, state.policy


def test_an_engine_with_all_names_follows_whole_plans(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = build(scheduler=f"{__name__}:Own", require="chunks")
    assert tier(scheduler) == ("chunks", f"{__name__}:Own")
    assert not caplog.records
    send(scheduler, "a", 40)
    send(scheduler, "b", 40)
    assert step(scheduler) == {"b": 10, "a": 10}
    assert step(scheduler) == {}, "both are held"
    assert scheduler.get_request_counts() == (2, 0)


@pytest.mark.parametrize("name", OF_CHUNKS)
def test_without_a_name_of_chunks_the_queue_is_ordered(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(Scheduler, name)
    with caplog.at_level(logging.WARNING, "vllm.plait"):
        scheduler = build(scheduler=f"{__name__}:Preempting")
    (line,) = caplog.messages
    assert line.startswith("Plait's tier in this vLLM (9.9) is 'order'; it lacks: ")
    assert name in line
    assert tier(scheduler) == ("order", f"{__name__}:Preempting")
    send(scheduler, "a", 40)
    send(scheduler, "b", 40)
    assert step(scheduler) == {"b": 30}, "the latest first, and what the budget has"
    assert step(scheduler) == {"b": 10, "a": 21}, (
        "b is neither preempted nor held, and takes nothing of the budget's last"
    )
    assert scheduler.plait.planner.diverged_picks
    assert scheduler.max_num_scheduled_tokens == BUDGET_TOKENS


def test_a_hook_with_other_parameters_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def newer(_self: Any, request: Any, chunk: Any, *, room: int = 7) -> int:
        del request, chunk
        return room

    monkeypatch.setattr(Scheduler, "_reserve_prefill_lookahead", newer)
    scheduler = build()
    assert tier(scheduler) == ("order", "slo")
    assert scheduler._reserve_prefill_lookahead("request", "chunk") == 7


@pytest.mark.parametrize("lacks", [("need_mamba_block_aligned_split",), ("connector", "cache_config")])
def test_an_attribute_counts_as_a_method_does(lacks: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "lacks", lacks)
    scheduler = build()
    assert tier(scheduler)[0] == "order"
    send(scheduler, "a", 40)
    assert step(scheduler) == {"a": 40}


def lacking_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "get_request_counts")
    lacks = ("pause_state", "max_model_len", "max_num_active_reqs", "kv_holding_waiting")
    monkeypatch.setattr(Scheduler, "lacks", lacks)


def test_without_a_name_of_order_the_engine_schedules(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lacking_order(monkeypatch)
    scheduler = build()
    (line,) = caplog.messages
    assert line.startswith("Plait's tier in this vLLM (9.9) is 'reports'; it lacks: ")
    assert "Scheduler.get_request_counts, " in line
    assert "Scheduler.max_num_active_reqs or PlannedScheduler.max_num_running_reqs" in line
    assert tier(scheduler) == ("reports", "engine")
    driver: VllmDriver = scheduler.plait
    call = send(scheduler, "a", 90, plait_handle="h", plait_gateway="one")
    send(scheduler, "b", 40)
    assert driver.change_objectives(b'[{"plait_handle":"h","plait_ttft_ms":900}]') == 1
    assert call.slo == Slo(ttft_s=0.9)
    report = driver.report(None, None)
    assert (report.queue.waiting, report.queue.waiting_tokens, report.scheduler.slots) == (2, 130, 0)
    assert report.calls is not None
    assert [(one.gateway, one.prompt_tokens) for one in report.calls] == [("one", 90)]
    assert report.scheduler.takes_objectives
    assert step(scheduler) == {"a": 90, "b": 10}
    report = driver.report(None, None)
    assert (report.queue.running, report.iteration.budget_tokens) == (2, BUDGET_TOKENS)


def test_groups_of_layers_are_reported_with_the_most_blocks_of_a_call() -> None:
    scheduler = build()
    assert scheduler.plait.report(None, None).kv.groups == []
    window = SimpleNamespace(max_memory_usage_bytes=lambda _: 33 * 100, page_size_bytes=100)
    scheduler.kv_cache_config.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=window))
    coordinator = scheduler.kv_cache_manager.coordinator
    coordinator.single_type_managers += (SimpleNamespace(block_size=32),)
    assert kv_groups(scheduler) == [KvGroup(fake_package.BLOCK_TOKENS), KvGroup(32, 33)]


def test_what_the_cache_has_is_exact_in_the_lowest_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking_order(monkeypatch)
    scheduler = build()
    send(scheduler, "a", 64)
    request, pool = scheduler.requests["a"], scheduler.kv_cache_manager.block_pool
    pool.cache_full_blocks(request, pool.take(4), 0, 4, fake_package.BLOCK_TOKENS, 0)
    (stored,) = scheduler.plait.report(None, None).stored
    assert list(stored.hashes) == list(scheduler.plait.observer.prompt_blocks(request))


def test_the_engines_own_priorities_are_refused_only_if_plait_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.__init__

    def with_priorities(self: Scheduler, vllm_config: Any) -> None:
        original(self, vllm_config)
        self.waiting = []  # type: ignore[assignment]

    monkeypatch.setattr(Scheduler, "__init__", with_priorities)
    with pytest.raises(UnsupportedEngineError, match="--scheduling-policy fcfs"):
        build()
    lacking_order(monkeypatch)
    assert tier(build()) == ("reports", "engine")


def test_without_a_name_of_reports_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Pool, "touch")
    monkeypatch.delattr(Scheduler, "_preempt_request")
    with pytest.raises(UnsupportedEngineError, match=r"this vLLM \(9\.9\); it lacks: \S+BlockPool\.touch\. Start"):
        build()


def test_without_an_attribute_of_reports_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "lacks", ("running", "connector"))
    with pytest.raises(UnsupportedEngineError, match=r"it lacks: PlannedScheduler\.running\. Start"):
        build()


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"require": "chunks"}, OF_CHUNKS[:1]),
        ({"require": "chunks"}, OF_ORDER),
        ({"require": "order"}, OF_ORDER),
        ({"scheduler": "fcfs"}, OF_ORDER),
        ({"scheduler": "fcfs", "require": "reports"}, OF_ORDER),
    ],
)
def test_the_start_fails_below_the_tier_that_is_asked_for(
    settings: dict[str, str], names: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        monkeypatch.delattr(Scheduler, name)
    with pytest.raises(UnsupportedEngineError, match=rf"--require or a named scheduler needs; it lacks: .*{names[0]}"):
        build(**settings)


def test_a_named_scheduler_needs_no_more_than_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Scheduler, "_preempt_request")
    assert tier(build(scheduler="fcfs")) == ("order", "fcfs")
    assert tier(build(require="order")) == ("order", "slo")


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"'everything'.*\$\.require"):
        build(require="everything")


def test_preempted_requests_wait_for_their_turn_again() -> None:
    scheduler = build(scheduler=f"{__name__}:Preempting")
    send(scheduler, "a", 40)
    step(scheduler)
    assert step(scheduler) == {}
    assert [one.status for one in scheduler.waiting] == [RequestStatus.PREEMPTED]
    assert isinstance(scheduler.waiting, Queue)
