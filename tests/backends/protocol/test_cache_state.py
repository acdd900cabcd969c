"""A report as it travels: what an older adapter leaves out is not known."""

from __future__ import annotations

import msgspec
import pytest

from plait.backends.protocol.cache_state import MAX_NAME, TIERS, CacheState, KvState, SchedulerState, StoredRun

REPORT = CacheState(
    engine="e", kind="vllm", epoch="1", cursor=1, model="m", block_tokens=16, granularity_tokens=64,
    snapshot=True, stored=[], removed=[], kv=KvState(10, 10, 0), scheduler=SchedulerState("slo", 0.5, 7, slots=16),
)  # fmt: skip


def test_a_report_arrives_as_it_was_sent() -> None:
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(REPORT), type=CacheState)
    received.check()
    assert received == REPORT


def test_an_older_adapter_does_not_tell_its_slots() -> None:
    sent = msgspec.to_builtins(REPORT)
    del sent["scheduler"]["slots"]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CacheState)
    received.check()
    assert received.scheduler == SchedulerState("slo", 0.5, 7, slots=0)


def test_an_older_adapter_has_no_tiers_and_does_all() -> None:
    sent = msgspec.to_builtins(REPORT)
    del sent["scheduler"]["tier"]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CacheState)
    received.check()
    assert received.scheduler.tier == "chunks"


@pytest.mark.parametrize("tier", [*TIERS, "a later adapter's"])
def test_a_tier_arrives_as_it_was_sent(tier: str) -> None:
    sent = msgspec.structs.replace(REPORT, scheduler=SchedulerState(tier=tier))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CacheState)
    received.check()
    assert received.scheduler.tier == tier


def test_a_tier_has_the_length_of_a_name() -> None:
    sent = msgspec.structs.replace(REPORT, scheduler=SchedulerState(tier="x" * (MAX_NAME + 1)))
    with pytest.raises(ValueError, match="names are longer"):
        sent.check()


def test_what_a_later_adapter_adds_is_ignored() -> None:
    stored = StoredRun(None, [1, 2])
    sent = msgspec.to_builtins(msgspec.structs.replace(REPORT, stored=[stored]))
    sent["new"] = sent["kv"]["new"] = sent["scheduler"]["new"] = 1
    sent["stored"] = [[*run, "new"] for run in sent["stored"]]
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CacheState)
    received.check()
    assert received == msgspec.structs.replace(REPORT, stored=[stored])


def test_a_report_of_a_kind_without_a_row_is_refused() -> None:
    sent = {**msgspec.to_builtins(REPORT), "kind": "tgi"}
    with pytest.raises(msgspec.ValidationError, match="kind = 'tgi': expected one of embedded, sglang, vllm"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=CacheState)
