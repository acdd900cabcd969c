"""What stands in for names that SGLang has got since the oldest version that the plugin supports."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from plait.backends.adapter.required_names import UnsupportedEngineError
from plait.backends.sglang.cache_state import CacheObserver, EventTap
from plait.backends.sglang.compatibility import (
    abort_in_chunks,
    chat_encoding,
    complete,
    has_beams,
    namespace,
    rank_count,
    rank_of,
    releasing,
    send_ticks,
    started_with,
)
from plait.backends.sglang.scheduler import PlannedSglangScheduler, _check_options
from plait.policy.prefix.block_hash import chain, root_hash
from tests.backends.sglang.fake_scheduler import FakeScheduler, Rank, Request, Setup

Put = Callable[..., None]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Puts a module with some names into SGLang's place."""

    def put_module(path: str, **names: Any) -> None:
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)

    return put_module


# Ticks.


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """A receiver whose requests are `pulled` on one rank."""

    pulled: list[Any] | None
    input_blocker: Any

    def recv_requests(self) -> list[Any] | None:
        return self.pulled if self.input_blocker is None else self.input_blocker.handle(self.pulled)


class Blocker:
    """Holds back the first request."""

    def handle(self, requests: list[Any] | None) -> list[Any] | None:
        return None if requests is None else requests[1:]


@pytest.mark.parametrize(
    ("pulled", "blocker", "tick", "received"),
    [
        (["a", "b"], None, "tick", ["a", "b", "tick"]),
        (["a", "b"], Blocker(), "tick", ["b", "tick"]),
        (["a", "b"], None, None, ["a", "b"]),
        (None, Blocker(), "tick", None),
    ],
)
def test_the_leading_ranks_tick_goes_with_the_requests(
    pulled: list[Any] | None, blocker: Any, tick: str | None, received: list[Any] | None
) -> None:
    asked: list[str | None] = []

    def told() -> str | None:
        asked.append(tick)
        return tick

    scheduler = SimpleNamespace(request_receiver=Receiver(pulled=pulled, input_blocker=blocker))
    send_ticks(scheduler, object(), told)
    assert scheduler.request_receiver.recv_requests() == received
    assert bool(asked) is (pulled is not None), "only the leading rank has a tick"


def test_a_version_that_polls_for_aborts_gets_ticks_with_them() -> None:
    receiver = Receiver(pulled=[], input_blocker=None)
    scheduler = SimpleNamespace(request_receiver=receiver, _poll_timeout_aborts=list)
    send_ticks(scheduler, scheduler, list)
    assert scheduler.request_receiver is receiver


# Scheduling.


class OlderScheduler(FakeScheduler):
    """Takes the running batch from itself, and returns a batch alone."""

    def get_new_batch_prefill(self, *none: Any) -> Any:
        assert not none
        return super().get_new_batch_prefill(self.running_batch).batch_to_run


class OlderRank(PlannedSglangScheduler, OlderScheduler):
    """A rank of it."""

    __init__ = Rank.__init__


def test_a_pass_of_an_older_version_is_planned() -> None:
    rank = OlderRank(Setup(), time.monotonic)
    first, second = (Request(name, range(200), 10, SimpleNamespace(custom_params={})) for name in "ab")
    rank.process_input_requests([first, second])
    batch = rank.get_new_batch_prefill()
    assert (batch.reqs, rank.chunked_req) == ([first, second], second)
    assert rank.plait.planner is not None
    assert rank.plait.planner.diverged_picks == 0
    assert rank.waiting_queue == []


@pytest.mark.parametrize(
    ("asked", "ends"), [(("a", False), True), (("ab", False), True), (("b", False), False), (("", True), True)]
)
def test_a_prompt_in_chunks_is_aborted_though_it_is_held_back(asked: tuple[str, bool], ends: bool, put: Put) -> None:
    put("sglang.srt.managers.schedule_batch", FINISH_ABORT=lambda: "aborted")
    request = SimpleNamespace(rid="ab", to_finish=None)
    scheduler = SimpleNamespace(chunked_req=request)
    name, everything = asked
    abort_in_chunks(scheduler, scheduler, SimpleNamespace(rid=name, abort_all=everything))
    assert request.to_finish == ("aborted" if ends else None)


def test_a_version_that_aborts_it_itself_is_left_alone() -> None:
    request = SimpleNamespace(rid="a", to_finish=None)
    scheduler = SimpleNamespace(chunked_req=request, process_pending_chunked_abort=list, enable_overlap=True)
    abort_in_chunks(scheduler, scheduler, SimpleNamespace(rid="a", abort_all=False))
    abort_in_chunks(SimpleNamespace(chunked_req=None), object(), SimpleNamespace(rid="", abort_all=True))
    assert request.to_finish is None
    for stock, has in ((object(), True), (scheduler, False)):
        completed = SimpleNamespace(enable_overlap=True)
        complete(completed, stock)
        assert hasattr(completed, "_pending_chunked_abort_req") is has


def test_a_request_is_released_with_the_servers_arguments_if_it_takes_them() -> None:
    scheduler = SimpleNamespace(server_args="arguments")

    def older(index: int, server_args: str) -> tuple[int, str]:
        return index, server_args

    assert releasing(older, scheduler)(3) == (3, "arguments")
    assert releasing(abs, scheduler) is abs


def test_what_sglang_was_started_with(put: Put) -> None:
    arguments = SimpleNamespace(pp_size=2)
    context = "sglang.srt.runtime_context"
    put(context, get_parallel=lambda: "without sizes")
    assert started_with("parallel", arguments) is arguments
    put(context, get_parallel=lambda: "sizes", get_serving=lambda: "names")
    assert (started_with("parallel", arguments), started_with("serving", arguments)) == ("sizes", "names")


def test_how_many_data_parallel_ranks_there_are(put: Put) -> None:
    assert rank_count(SimpleNamespace(dp_size=4)) == 4
    put("sglang.srt.runtime_context", get_serving=object, get_parallel=lambda: SimpleNamespace(dp_size=2))
    assert rank_count(None) == 2
    groups = SimpleNamespace(dp_size=1, attn_dp_size=8, num_dp_ranks=8)
    put("sglang.srt.runtime_context", get_serving=object, get_parallel=lambda: groups)
    assert rank_count(None) == 8


def test_a_schedulers_data_parallel_rank(put: Put) -> None:
    assert rank_of(SimpleNamespace(ps=SimpleNamespace(dp_rank=3))) == 3
    assert rank_of(SimpleNamespace(ps=SimpleNamespace(dp_rank=None))) == 0
    put("sglang.srt.runtime_context", get_serving=object, get_parallel=lambda: SimpleNamespace(dp_rank=2))
    assert rank_of(SimpleNamespace(server_args=None)) == 2


def test_ranks_of_attention_are_refused_where_all_would_get_the_ticks_of_the_first() -> None:
    def check(stock: Any, **options: Any) -> None:
        arguments = SimpleNamespace(pp_size=1, **options)
        mode = SimpleNamespace(value="null")
        _check_options(SimpleNamespace(server_args=arguments, disaggregation_mode=mode), stock, "reports")

    with pytest.raises(UnsupportedEngineError, match="--enable-dp-attention before"):
        check(object(), dp_size=2, enable_dp_attention=True)
    check(object(), dp_size=2, enable_dp_attention=False)
    check(SimpleNamespace(_poll_timeout_aborts=list), dp_size=2, enable_dp_attention=True)


def test_beams() -> None:
    assert not has_beams(SimpleNamespace())
    assert not has_beams(SimpleNamespace(beam_group=None))
    assert has_beams(SimpleNamespace(beam_group=1))


# Salts.


class BlockStored(msgspec.Struct):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str = "GPU"


class BlockStoredWithMetadata(BlockStored, kw_only=True):
    metadata: Any


class BlockRemoved(msgspec.Struct):
    block_hashes: list[int]
    medium: str = "GPU"


class TreeCache:
    """Names pages by their tokens alone, as versions before 0.5.18 do."""

    def __init__(self) -> None:
        self.kv_event_queue: list[Any] = []

    def _record_store_event(self, node: Any) -> None:
        tokens: Sequence[int] = node.key.token_ids
        first, second = hash(tuple(tokens[:64])), hash(tuple(tokens))
        self.kv_event_queue.append(BlockStored([first], None, list(tokens[:64]), 64))
        self.kv_event_queue.append(BlockStored([second], first, list(tokens[64:]), 64))

    def _record_remove_event(self, node: Any) -> None:
        tokens: Sequence[int] = node.key.token_ids
        self.kv_event_queue.append(BlockRemoved([hash(tuple(tokens[:64])), hash(tuple(tokens))]))

    def take_events(self) -> list[Any]:
        taken, self.kv_event_queue = self.kv_event_queue, []
        return taken


class OlderRadixKey:
    def __init__(self, token_ids: Sequence[int], extra_key: str | None = None) -> None:
        self.token_ids, self.extra_key = token_ids, extra_key


TOKENS = range(128)


def names(salt: str) -> Sequence[int]:
    """The tree blocks of the tokens."""
    return chain(TOKENS, 64, root_hash("m", salt))


def test_pages_of_a_salt_have_its_names_though_events_do_not_tell_it(put: Put) -> None:
    put("sglang.srt.mem_cache.radix_cache", RadixKey=OlderRadixKey)
    cache: Any = TreeCache()
    observer = CacheObserver(page_tokens=64, model="m")
    tap = EventTap(cache, observer, published=True)
    nodes = [SimpleNamespace(key=OlderRadixKey(TOKENS, salt)) for salt in (None, "tenant", "other")]
    for node in nodes:
        cache._record_store_event(node)
    tap.drain()
    assert set(observer.journal.stored) == {*names(""), *names("tenant"), *names("other")}
    for node in nodes[:2]:
        cache._record_remove_event(node)
    tap.drain()
    assert set(observer.journal.stored) == set(names("other"))
    published = cache.take_events()
    assert {type(event) for event in published} == {BlockStored, BlockRemoved}, "SGLang publishes its own"
    assert len(published) == 8


def test_the_core_of_a_tree_records_its_events(put: Put) -> None:
    put("sglang.srt.mem_cache.radix_cache", RadixKey=OlderRadixKey)
    core: Any = TreeCache()
    cache = SimpleNamespace(tree_core=core, take_events=core.take_events)
    observer = CacheObserver(page_tokens=64, model="m")
    tap = EventTap(cache, observer, published=False)
    core._record_store_event(SimpleNamespace(key=OlderRadixKey(TOKENS, "tenant")))
    tap.drain()
    assert set(observer.journal.stored) == set(names("tenant"))


def test_a_version_with_salts_in_its_keys_is_left_alone(put: Put) -> None:
    put("sglang.srt.mem_cache.radix_cache", RadixKey=lambda *, cache_salt: cache_salt)
    cache: Any = TreeCache()
    observer = CacheObserver(page_tokens=64, model="m")
    EventTap(cache, observer, published=False)
    assert "_record_store_event" not in vars(cache)


def test_a_salt_in_the_metadata_of_an_event() -> None:
    observer = CacheObserver(page_tokens=64, model="m")
    metadata = SimpleNamespace(cache_salt="tenant")
    observer.observe([BlockStoredWithMetadata([1, 2], None, list(TOKENS), 64, metadata=metadata)])
    assert set(observer.journal.stored) == set(names("tenant"))


def test_a_request_has_its_salt_in_the_key_before_it_has_one_of_its_own() -> None:
    assert namespace(SimpleNamespace(extra_key="tenant")) == ("tenant", None)
    assert namespace(SimpleNamespace(extra_key="key", cache_salt="tenant")) == ("tenant", "key")


# Chats.


def test_the_encoding_of_chats(put: Put) -> None:
    manager = SimpleNamespace(model_config=SimpleNamespace(hf_config="config"), tokenizer="tokenizer")
    chats = "sglang.srt.entrypoints.openai"
    put(f"{chats}.serving_chat")
    assert chat_encoding(manager, "parser") is None

    class OpenAIServingChat:
        tool_call_parser: str
        tokenizer_manager: Any

        def _resolve_chat_encoding_spec(self) -> str:
            return f"{self.tool_call_parser} of {self.tokenizer_manager.tokenizer}"

    put(f"{chats}.serving_chat", OpenAIServingChat=OpenAIServingChat)
    assert chat_encoding(manager, "parser") == "parser of tokenizer"
    put(f"{chats}.chat_encoding", resolve_chat_encoding_spec=lambda **asked: " ".join(asked.values()))
    assert chat_encoding(manager, "parser") == "config tokenizer parser"
