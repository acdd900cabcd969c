"""The driver over a scheduler of made-up requests: a call is planned by its newest objectives."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from plait.backends.adapter.scheduler_settings import VllmSettings
from plait.backends.errors import CallerError
from plait.backends.protocol.cache_state import CacheState, OutstandingCall
from plait.backends.vllm import plugin
from plait.backends.vllm.cache_state import PoolObserver
from plait.backends.vllm.driver import VllmDriver
from plait.policy.prefix.block_hash import chain, root_hash
from plait.policy.types import Objective, Slo
from tests.backends.vllm.fake_pool import Pool, request
from tests.invariants import check

BLOCK_TOKENS = 16
STATUSES = SimpleNamespace(WAITING="waiting", PREEMPTED="preempted")


class Core:
    """An engine core whose scheduler only has requests."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.requests: dict[str, Any] = {}
        pool = Pool(100)
        manager = SimpleNamespace(block_size=BLOCK_TOKENS, req_to_blocks={})
        config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tiny"))
        inner = SimpleNamespace(
            max_num_scheduled_tokens=512,
            max_num_active_reqs=8,
            num_waiting_for_streaming_input=0,
            num_lookahead_tokens=0,
            max_model_len=4096,
            kv_cache_manager=SimpleNamespace(
                block_pool=pool, coordinator=SimpleNamespace(single_type_managers=(manager,))
            ),
            vllm_config=config,
            requests=self.requests,
            waiting=[],
            kv_holding_waiting=[],
            running=[],
        )
        observer = PoolObserver(pool, group_id=0, block_tokens=BLOCK_TOKENS, model="tiny")
        self.driver = VllmDriver(
            inner,
            observer,
            VllmSettings(),
            statuses=STATUSES,
            clock=lambda: self.now_s,
            wall_clock=lambda: 0.0,
        )
        self.reports = plugin.CacheReports(self.driver)
        self.scheduler = SimpleNamespace(plait=self.driver, cache_reports=self.reports)

    def receive(self, name: str, **annotations: Any) -> Any:
        """A request arrives; returns its call."""
        sent = request(list(range(64)), BLOCK_TOKENS)
        one = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=64,
            num_tokens=64,
            max_tokens=50,
            all_token_ids=list(range(64)),
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            cache_salt=None,
            arrival_time=0.0,
            sampling_params=SimpleNamespace(extra_args=annotations),
            block_hashes=sent.block_hashes,
            skip_reading_prefix_cache=False,
        )
        self.requests[name] = one
        self.driver.received(one)
        return one.plait_call

    def produce(self, name: str, tokens: int = 1, *, finished: bool = False) -> None:
        """An iteration has ended with tokens of a request."""
        output = SimpleNamespace(request_id=name, new_token_ids=[0] * tokens, finished=finished)
        if finished:
            del self.requests[name]
        self.driver.ended(object(), {0: SimpleNamespace(outputs=[output])})

    def change(self, body: str) -> int:
        return plugin._call_objectives(self, body)

    def waiting(self, gateway: str | None, since: int | None = None) -> Future[bytes]:
        """What waits for news since a cursor, by default the present one."""
        found = plugin._cache_state(self, self.driver.cursor if since is None else since, None, gateway, True)
        assert isinstance(found, Future)
        return found

    @property
    def attainment(self) -> float | None:
        return self.driver.report(None, None).scheduler.slo_attainment


def test_a_call_has_its_newest_objectives() -> None:
    core = Core()
    call = core.receive("cmpl-1-0-a1b2", plait_handle="h", plait_jct_ms=9000)
    assert (call.slo, call.max_output_tokens) == (Slo(jct_s=9.0), 50)
    assert core.change('[{"plait_handle":"h","plait_tpot_ms":40,"plait_objective":"latency"}]') == 1
    assert (call.slo, call.objective) == (Slo(tpot_s=0.04), Objective.LATENCY)
    scheduler = core.driver.report(None, None).scheduler
    assert (scheduler.takes_objectives, scheduler.slots) == (True, 8)


def test_a_change_may_come_before_its_call() -> None:
    core = Core()
    assert core.change('[{"plait_handle":"h","plait_tpot_ms":40}]') == 0
    assert core.receive("a", plait_handle="h").slo == Slo(tpot_s=0.04)


def test_attainment_counts_what_a_call_is_promised_at_its_end() -> None:
    core = Core()
    core.receive("a", plait_handle="h")
    core.now_s += 2.0
    core.produce("a")
    core.change('[{"plait_handle":"h","plait_ttft_ms":1500,"plait_jct_ms":9000}]')
    core.produce("a", finished=True)
    assert core.attainment == 0.0, "its first token had come too late"


def test_calls_that_have_ended_are_forgotten() -> None:
    core = Core()
    for name in "ab":
        core.receive(name, plait_handle=name)
    core.produce("a", finished=True)
    del core.requests["b"]
    core.driver.given_up()
    assert core.change('[{"plait_handle":"a"},{"plait_handle":"b"}]') == 0
    check(core.driver._reporter.refinable)


def test_a_bad_body_changes_nothing() -> None:
    core = Core()
    call = core.receive("a", plait_handle="h", plait_jct_ms=9000)
    with pytest.raises(CallerError):
        core.change('[{"plait_handle":"h"},{}]')
    assert call.slo == Slo(jct_s=9.0)


def told(waiting: Future[bytes]) -> CacheState:
    return msgspec.msgpack.decode(waiting.result(timeout=0), type=CacheState)


def test_a_call_is_told_to_all_gateways_but_its_own() -> None:
    core = Core()
    one, two, nobody = core.waiting("one"), core.waiting("two"), core.waiting(None)
    core.receive("a", plait_gateway="one", plait_ttft_ms=900)
    core.reports.publish()
    hashes = list(chain(range(64), 64, root_hash("tiny")))
    call = OutstandingCall(1, "one", 64, 64, True, False, hashes)
    assert told(two).calls == told(nobody).calls == [call]
    assert not one.done()
    two = core.waiting("two")
    core.produce("a")
    core.reports.publish()
    assert told(two).calls == [OutstandingCall(1, "one", 64, 0, True, True, [])]
    two = core.waiting("two")
    del core.requests["a"]
    core.driver.given_up()
    core.reports.publish()
    assert (told(two).calls, told(two).ended) == ([], [1])
    assert not one.done()


def test_a_gateway_that_asks_again_does_not_wait_twice() -> None:
    core = Core()
    earlier, other = core.waiting("one"), core.waiting("two")
    later = core.waiting("one")
    assert told(earlier).calls == []
    assert not later.done()
    assert not other.done()


def test_at_most_so_many_wait() -> None:
    core = Core()
    waiting = [core.waiting(None) for _ in range(plugin.MAX_WAITING + 1)]
    assert [one.done() for one in waiting] == [True] + [False] * plugin.MAX_WAITING
