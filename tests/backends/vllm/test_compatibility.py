"""What stands in for the names that older versions of vLLM lack, on schedulers that have the names of a version."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from plait.backends.vllm.compatibility import CompatibleScheduler, limiting

READY = ("waiting", "preempted")


class Queue(list[Any]):
    def remove_requests(self, requests: Collection[Any]) -> None:
        self[:] = [request for request in self if request not in requests]


class Version025:
    """The names of vLLM 0.25. Notes which requests it preempts, and how."""

    max_num_running_reqs = 8
    need_mamba_block_aligned_split = False

    def __init__(self) -> None:
        self.connector: object | None = None
        self.waiting = Queue()
        self.skipped_waiting = Queue()
        self.running: list[Any] = []
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.preempted: list[tuple[str, dict[str, Any]]] = []
        self.requests: list[Any] = []
        self.plait = SimpleNamespace(limits={})

    def schedule(self) -> list[int]:
        """The tokens of each request, 100 if nothing cuts them."""
        return [self._tokens(request, 100) for request in self.requests]

    def _tokens(self, request: Any, new: int) -> int:
        return self._mamba_block_aligned_split(request, new) if self.need_mamba_block_aligned_split else new

    def _mamba_block_aligned_split(self, request: Any, new: int) -> int:
        assert request in self.requests
        return new // 16 * 16

    def _preempt_request(self, request: Any, timestamp: float, **options: Any) -> None:
        assert timestamp > 0
        self.preempted.append((request.request_id, options))


class Version031(Version025):
    """The names of vLLM 0.31."""

    max_num_active_reqs = 4
    requires_kv_delivery = True

    def __init__(self) -> None:
        super().__init__()
        self.kv_holding_waiting = Queue()
        del self.skipped_waiting
        self.connector = object()

    def _tokens(self, request: Any, new: int) -> int:
        return self._reserve_prefill_lookahead(request, 0, super()._tokens(request, new))

    def _reserve_prefill_lookahead(self, request: Any, computed: int, new: int) -> int:
        assert request in self.requests
        return new - computed

    def _request_blocks_can_be_freed(self, request: Any) -> bool:
        return bool(request.request_id != "written to")


def request_of(name: str, status: str = "waiting") -> Any:
    return SimpleNamespace(request_id=name, status=status)


def compatible(scheduler: Version025) -> CompatibleScheduler:
    return CompatibleScheduler(scheduler, READY)


def test_slots() -> None:
    assert compatible(Version025()).slots == 8
    assert compatible(Version031()).slots == 4, "--max-num-active-seqs is set"


def test_requests_that_only_wait_for_their_turn_are_planned_again() -> None:
    scheduler = Version025()
    waiting, grammar, skipped, preempted = map(request_of, ("a", "b", "c", "d"), ("waiting", "grammar", *READY))
    scheduler.waiting.append(waiting)
    scheduler.skipped_waiting += [grammar, skipped, preempted]
    compatible(scheduler).take_back_skipped()
    assert scheduler.waiting == [waiting, skipped, preempted]
    assert compatible(scheduler).waiting_elsewhere == scheduler.skipped_waiting == [grammar]


def test_requests_that_wait_for_a_transfer_stay() -> None:
    scheduler = Version031()
    scheduler.kv_holding_waiting.append(request_of("a"))
    compatible(scheduler).take_back_skipped()
    assert scheduler.waiting == []
    assert compatible(scheduler).waiting_elsewhere == scheduler.kv_holding_waiting


@pytest.mark.parametrize(("version", "options"), [(Version025, {}), (Version031, {"drop_stale_output": True})])
def test_preemption(version: type[Version025], options: dict[str, bool]) -> None:
    scheduler, request = version(), request_of("a")
    scheduler.running.append(request)
    scheduler.prev_step_scheduled_req_ids.add("a")
    compatible(scheduler).preempt(request)
    assert (scheduler.running, scheduler.preempted) == ([], [("a", options)])
    assert scheduler.prev_step_scheduled_req_ids == set()


def test_a_request_stays_whose_blocks_a_connector_may_write_to() -> None:
    old, new, request = Version025(), Version031(), request_of("written to")
    old.connector = object()
    for scheduler in (old, new):
        scheduler.running.append(request)
        compatible(scheduler).preempt(request)
        assert (scheduler.running, scheduler.preempted) == ([request], [])


@pytest.mark.parametrize("version", [Version025, Version031])
def test_the_limit_of_a_request(version: type[Version025]) -> None:
    scheduler = type("Limited", (limiting(version), version), {})()
    scheduler.requests = [request_of("a"), request_of("b")]
    assert scheduler.schedule() == [100, 100]
    scheduler.plait.limits = {"a": 7}
    assert scheduler.schedule() == [7, 100]
    assert not scheduler.need_mamba_block_aligned_split


@pytest.mark.parametrize("version", [Version025, Version031])
def test_the_limit_of_a_request_to_a_mamba_model(version: type[Version025]) -> None:
    scheduler = type("Limited", (limiting(version), version), {"need_mamba_block_aligned_split": True})()
    scheduler.requests = [request_of("a"), request_of("b")]
    for limits, tokens in (({}, [96, 96]), ({"a": 32}, [32, 96]), ({"a": 0}, [0, 96])):
        scheduler.plait.limits = limits
        assert scheduler.schedule() == tokens
    assert scheduler.need_mamba_block_aligned_split
