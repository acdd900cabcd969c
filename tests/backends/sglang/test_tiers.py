"""The plugin in a SGLang that lacks some names starts with the highest tier that needs none of them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.adapter.scheduler_settings import SglangSettings
from plait.backends.protocol.cache_state import TIERS, Tier
from plait.backends.sglang import plugin
from plait.backends.sglang.compatibility import REQUIRED, CompatibleAdder, complete, next_output_ends, prefix_tokens
from plait.backends.sglang.levers import LimitedAdder, PrefillPass, limited
from plait.policy.scheduling.plan import EngineFacts, LocalCall, Plan
from tests.backends.sglang.fake_scheduler import Rank, Request, Setup


class Chaos:
    """Plans any order and any chunks, and holds back or preempts any call."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def plan(
        self, now_s: float, waiting: Sequence[LocalCall], running: Sequence[LocalCall], facts: EngineFacts
    ) -> Plan:
        del now_s
        dice, calls = self._dice, [*running, *waiting]
        dice.shuffle(calls)
        victims = [call for call in running if dice.random() < 0.1]
        named = [call for call in calls if call not in victims and dice.random() < 0.8]
        cut = dice.randrange(len(named) + 1)
        picks = tuple((call, dice.randrange(1, facts.max_batch_tokens)) for call in named[:cut])
        return Plan(tuple(victims), picks, tuple(named[cut:]), dice.choice((None, 40)))


def request(name: str, tokens: int, **annotations: Any) -> Request:
    return Request(name, range(tokens), 10, SimpleNamespace(custom_params=annotations))


def run(rank: Rank, received: Sequence[Any] = ()) -> None:
    """Step until all requests have ended."""
    steps = 0
    while rank.busy or received:
        rank.begin_step([*rank._poll_timeout_aborts(), *received])
        rank.end_step()
        received, steps = (), steps + 1
        assert steps < 2000, "the engine makes no progress"


def tier_of(rank: Rank) -> tuple[str, str]:
    state = rank.plait.report(None, None).scheduler
    return state.tier, state.policy


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_without_chunks_limits_or_preempts_or_stops_the_engine(seed: int) -> None:
    rank = Rank(Setup(), time.monotonic, policy=Chaos(seed), tier="order")
    run(rank, [request(f"r{number}", 40 + 60 * number) for number in range(8)])
    assert tier_of(rank) == ("order", "slo")
    assert not any(handed.limits for handed in rank.handed)
    assert all(handed.may_cut for handed in rank.handed)
    assert rank.plait.preemptions == rank.retractions
    assert {handed.chunk_tokens for handed in rank.handed} > {256}, "the budget is kept"


@pytest.mark.parametrize("seed", range(10))
def test_without_chunks_a_prompt_in_chunks_goes_on_with_any_other(seed: int) -> None:
    """SGLang would cut another, and has room for only one that is not finished."""
    rank = Rank(Setup(), time.monotonic, policy=Chaos(seed), tier="order")
    received: list[Any] = [request(f"r{number}", 400) for number in range(4)]
    passes = 0
    while rank.busy or received:
        in_chunks = rank.chunked_req
        rank.begin_step([*rank._poll_timeout_aborts(), *received])
        rank.end_step()
        handed, received = rank.handed[-1], []
        if in_chunks is not None and handed.shown:
            assert handed.chunked == in_chunks.rid
            passes += 1
    assert passes


def test_without_order_sglang_schedules_and_the_reports_go_on() -> None:
    rank = Rank(Setup(), time.monotonic, tier="reports")
    first, second = request("a", 300, plait_handle="h", plait_gateway="one"), request("b", 40)
    rank.begin_step([first, second])
    assert rank.plait.change_objectives(b'[{"plait_handle":"h","plait_ttft_ms":900}]') == 1
    assert first.plait_call.slo is not None
    assert rank.handed[0].shown == ("a", "b")
    assert (rank.handed[0].chunk_tokens, rank.handed[0].limits) == (256, {})
    report = rank.plait.report(None, None)
    assert (report.scheduler.tier, report.scheduler.policy, report.scheduler.slots) == ("reports", "engine", 6)
    assert (report.queue.waiting, report.queue.running) == (1, 1)
    assert report.iteration.budget_tokens == 256
    assert report.calls is not None
    assert [(call.gateway, call.prompt_tokens) for call in report.calls] == [("one", 300)]
    rank.end_step()
    run(rank)
    assert rank.plait.report(None, None).queue.running == 0


# On a made-up package with every name.


class Adder:
    """The names of SGLang's PrefillAdder. `added` has the room in which each chunk was added."""

    page_size = 16

    def __init__(self) -> None:
        self.rem_chunk_tokens = 100
        self.added: list[int] = []

    def add_chunked_req(self, req: Any) -> None:
        tokens = min(self.rem_chunk_tokens, len(req.full_untruncated_fill_ids) - prefix_tokens(req))
        self.rem_chunk_tokens -= tokens
        self.added.append(tokens)

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> None: ...

    def ceil_paged_tokens(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_size

    def budget_state(self) -> None: ...


class NewerAdder(Adder):
    """Has a limit of its own for the prompt in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.chunked_req_limit: int | None = None

    def add_chunked_req(self, req: Any) -> None:
        room, self.rem_chunk_tokens = self.rem_chunk_tokens, min(self.rem_chunk_tokens, self.chunked_req_limit or 100)
        super().add_chunked_req(req)
        self.rem_chunk_tokens = room - self.added[-1]


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The package `sglang`, with every method that the plugin relies on."""
    for names in (REQUIRED.reports, REQUIRED.order, REQUIRED.chunks):
        for methods in (names.methods, *names.either_method):
            for name, parameters in methods.items():
                _define(name, parameters, monkeypatch)
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "9.9", raising=False)
    return monkeypatch


def _define(name: str, parameters: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    *path, last = name.split(".")
    place: Any = None
    for end in range(1, len(path) + 1):
        dotted, part = ".".join(path[:end]), path[end - 1]
        if part[:1].isupper():
            if not hasattr(place, part):
                monkeypatch.setattr(place, part, type(part, (), {}), raising=False)
            place = getattr(place, part)
            continue
        if dotted not in sys.modules:
            monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
        if place is not None:
            monkeypatch.setattr(place, part, sys.modules[dotted], raising=False)
        place = sys.modules[dotted]
    if not hasattr(place, last):
        scope: dict[str, Any] = {}
        exec(f"def made(self, {', '.join(parameters).replace('?', '')}): ...", scope)
        kind = type(last, (), {"__init__": scope["made"]}) if last[:1].isupper() else scope["made"]
        monkeypatch.setattr(place, last, kind, raising=False)


MODULE = "sglang.srt.managers"
MISSING = {
    "chunks": (),
    "order": (f"{MODULE}.schedule_policy.PrefillAdder.budget_state",),
    "reports": (f"{MODULE}.scheduler.Scheduler.get_new_batch_prefill",),
}
"""The tier -> names without which it is the highest."""


@pytest.mark.parametrize("tier", TIERS)
def test_the_installed_version_has_the_tier_that_its_names_allow(tier: Tier, sglang: pytest.MonkeyPatch) -> None:
    for name in MISSING[tier]:
        sglang.delattr(name)
    assert REQUIRED.installed_tier() == tier
    plugin.check()
    sglang.setattr(plugin, "read_settings", lambda: SglangSettings(require="chunks"))
    if tier != "chunks":
        with pytest.raises(UnsupportedEngineError, match=rf"SGLang \(9\.9\) in the tier 'chunks'.*{MISSING[tier][0]}"):
            plugin.check()


def test_without_a_name_of_reports_the_plugin_is_refused(sglang: pytest.MonkeyPatch) -> None:
    sglang.delattr(f"{MODULE}.scheduler.Scheduler.process_input_requests")
    with pytest.raises(
        UnsupportedEngineError, match=r"this SGLang \(9\.9\); it lacks: \S+\.process_input_requests\. Start"
    ):
        plugin.check()


def test_ticks_go_one_of_two_ways(sglang: pytest.MonkeyPatch) -> None:
    sglang.delattr(f"{MODULE}.scheduler.Scheduler._poll_timeout_aborts")
    assert REQUIRED.installed_tier() == "chunks"
    sglang.delattr(f"{MODULE}.scheduler_components.request_receiver.SchedulerRequestReceiver.input_blocker")
    with pytest.raises(
        UnsupportedEngineError, match=r"it lacks: \S+\._poll_timeout_aborts or \S+\.input_blocker\. Start"
    ):
        plugin.check()


def test_a_prefill_pass_takes_the_running_batch_or_nothing(sglang: pytest.MonkeyPatch) -> None:
    prefill = f"{MODULE}.scheduler.Scheduler.get_new_batch_prefill"
    sglang.setattr(prefill, lambda self: self)
    assert REQUIRED.installed_tier() == "chunks"
    sglang.setattr(prefill, lambda self, other: (self, other))
    assert REQUIRED.installed_tier() == "reports"


def test_a_version_without_the_adders_method_has_its_module(sglang: pytest.MonkeyPatch) -> None:
    sglang.delattr(f"{MODULE}.scheduler.Scheduler.get_prefill_adder_class")
    assert REQUIRED.installed_tier() == "chunks"
    sglang.delattr(f"{MODULE}.scheduler.PrefillAdder")
    assert REQUIRED.installed_tier() == "order"


# What stands in for names.


def test_the_modules_own_adder_is_limited_while_it_schedules(sglang: pytest.MonkeyPatch) -> None:
    module = sys.modules[f"{MODULE}.scheduler"]
    sglang.setattr(module, "PrefillAdder", Adder)
    allowed = PrefillPass({"a": 5})
    with CompatibleAdder(object(), limited).limiting(allowed):
        adder = module.PrefillAdder()
        assert isinstance(adder, LimitedAdder)
        assert adder.plait_pass is allowed
    assert module.PrefillAdder is Adder
    newer = SimpleNamespace(get_prefill_adder_class=None)
    with CompatibleAdder(newer, limited).limiting(allowed):
        assert module.PrefillAdder is Adder


@pytest.mark.parametrize("base", [Adder, NewerAdder])
def test_the_chunk_of_the_prompt_in_chunks(base: type[Adder]) -> None:
    one = SimpleNamespace(rid="a", full_untruncated_fill_ids=range(400), prefix_indices=range(32))
    for limit, tokens in ((40, 32), (10, 10), (200, 100)):
        adder = limited(base, PrefillPass({"a": limit}))()
        adder.add_chunked_req(one)
        assert adder.added == [tokens], "it ends with a page, unless it is less than one"
        assert adder.rem_chunk_tokens == 100 - tokens


def test_nothing_is_in_flight_without_overlap() -> None:
    for overlaps, has in ((False, True), (True, False)):
        scheduler = SimpleNamespace(enable_overlap=overlaps)
        complete(scheduler, scheduler)
        assert hasattr(scheduler, "result_queue") is has


def test_nothing_is_in_flight_before_the_event_loop_makes_its_queue() -> None:
    class Stock:
        @contextmanager
        def event_loop_overlap(self) -> Iterator[None]:
            self.result_queue = [1]
            yield

    scheduler = SimpleNamespace(enable_overlap=True)
    complete(scheduler, Stock())
    assert not scheduler.result_queue


def test_the_last_output_token_and_the_prefix() -> None:
    parameters = SimpleNamespace(max_new_tokens=3)
    for output, ends in (([1], False), ([1, 2], True)):
        assert next_output_ends(SimpleNamespace(output_ids=output, sampling_params=parameters)) is ends
    assert next_output_ends(SimpleNamespace(next_output_finishes_by_length=lambda: True))
    assert prefix_tokens(SimpleNamespace(prefix_indices=[1, 2])) == 2
    assert prefix_tokens(SimpleNamespace(prefix_indices=[1, 2], prefix_len=0)) == 0
