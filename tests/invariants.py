"""The invariants of data structures, which tests assert after each step: `check(graph)`."""

from __future__ import annotations

from functools import singledispatch

from plait.backends.adapter.state_reporter import EARLY_CHANGES, RefinableCalls
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.sessions import DeletedSessions, Sessions
from plait.lab.embedded.kv_blocks import BlockCache, KvBlocks
from plait.policy.programs.needs import Marks, Need, Needs, Offers, Stage, Stages
from plait.policy.programs.objectives import NOTHING, CriticalPaths, Deductions
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallNode, CallState, VariableNode, VariableState
from plait.policy.types import Objective, Slo


@singledispatch
def check(checked: object) -> None:
    """Assert the invariants."""
    raise TypeError(f"no invariants of {type(checked).__name__} are known")


@check.register
def _(variable: VariableNode) -> None:
    assert (variable.state is VariableState.EMPTY) == (variable.producer is None)
    assert (variable.state is VariableState.FAILED) == (variable.cause is not None)
    assert not variable.consumers or variable.state is not VariableState.FAILED
    assert variable.consumers or variable.state is not VariableState.EMPTY, f"{variable} was left behind"
    assert all(variable in call.inputs for call in variable.consumers)


@check.register
def _(call: CallNode) -> None:
    assert call.missing == sum(variable.state is not VariableState.SET for variable in call.inputs)
    assert (call.state is CallState.WAITING) == (call.missing > 0)
    assert all(call in variable.consumers for variable in call.inputs)
    assert all(variable.state is VariableState.SET for variable in call.outputs[: call.produced])
    assert all(variable.state is VariableState.PENDING for variable in call.unset)
    assert all(variable.producer == call.call_id for variable in call.outputs)
    assert all(call.rank < consumer.rank for _, consumer in call.edges())


@check.register
def _(graph: RequestGraph) -> None:
    for state, count in graph.counts.items():
        assert count == sum(node.state is state for node in graph.calls.values())
    for call_id, node in graph.calls.items():
        assert node.call_id == call_id
        check(node)
    for name, variable in graph.variables.items():
        assert variable.name == name
        check(variable)
        assert all(graph.calls[call.call_id] is call for call in variable.consumers)
        if variable.state is VariableState.PENDING:
            assert variable.producer is not None
            assert variable in graph.calls[variable.producer].unset


@check.register
def _(stages: Stages) -> None:
    assert stages._stages == {call_id: stage for stage, members in stages._members.items() for call_id in members}
    assert all(stages._members.values()), "an empty stage was left behind"


@check.register
def _(marks: Marks) -> None:
    assert all(marks._by_variable.values()), "an empty list was left behind"
    assert marks._annotations.keys() <= marks._graph.calls.keys()
    stated = [(name, mark) for name, found in marks._by_variable.items() for mark in found]
    assert marks.timed == {name for name, mark in stated if isinstance(mark, Slo) and mark.jct_s is not None}


@check.register
def _(needs_of: Needs) -> None:
    for call_id in (*needs_of._needs, *needs_of._offers):
        assert needs_of._needs.get(call_id) == needs_of._need_of(call_id)
    for call_id, offers in needs_of._offers.items():
        needs = [needs_of._needs.get(consumer) for consumer in needs_of._graph.consumers(call_id)]
        assert counted(offers) == {need: needs.count(need) for need in needs if need is not None}


@check.register
def _(paths: CriticalPaths) -> None:
    assert not paths._touched
    assert paths._first == paths._below_s.keys() - paths._waits.keys()
    for call_id in (*paths._below_s, *paths._waits):
        assert paths._below_s.get(call_id, {}) == paths._paths_s(call_id, None)
        assert paths._waits.get(call_id, 0) == len(paths._graph.calls[call_id].producers())


@check.register
def _(deductions: Deductions) -> None:
    for part in (deductions._marks, deductions._needs, deductions._stages, deductions.paths):
        check(part)
    assert NOTHING not in deductions._deduced.values()
    assert not (
        deductions._is_silent and (deductions._marks or deductions._needs or deductions.paths or deductions._deduced)
    )
    for call_id in deductions._deduced:
        assert call_id in deductions._graph.calls
        assert deductions._stages.of(call_id) == deductions._needs.stage(call_id)


@check.register
def _(session: Session) -> None:
    graph = session.graph
    check(graph)
    check(session.deductions)
    assert (session._variables, session._waiting_calls) == (len(graph.variables), graph.counts[CallState.WAITING])
    assert graph.calls.keys() == session.calls.keys()
    assert all(session.state_of(name) is VariableState.SET for name in session.values)
    assert all(graph.producer(name) is not None for name in session.outputs)
    for name, getters in session.getters.items():
        assert getters
        assert session.state_of(name) in {VariableState.EMPTY, VariableState.PENDING}
    timed = [getter for waiting in session.getters.values() for getter in waiting if getter.jct_s is not None]
    assert session.not_clocked.keys() == {getter for getter in timed if getter.since_s is None}
    for call in session.calls.values():
        assert call.ready_s is not None or graph.call_state(call.call_id) is CallState.WAITING


@check.register
def _(deleted: DeletedSessions) -> None:
    for ids in deleted._tenants.values():
        assert 0 < len(ids.heap) <= deleted._limit
        assert {session_id: until_s for until_s, session_id in ids.heap} == ids.until_s


@check.register
def _(all_sessions: Sessions) -> None:
    for tenant in all_sessions.tenants.values():
        assert tenant.sessions, "a tenant without sessions was left behind"
        sessions = tenant.sessions.values()
        assert tenant.variables == sum(len(session.graph.variables) for session in sessions)
        waiting = [session.graph.counts[CallState.WAITING] for session in sessions]
        assert tenant.waiting_calls == sum(waiting)
        assert set(tenant.idle.values()) == {session for session in sessions if session.is_idle}
        assert tenant.held_bytes == sum(session.held_bytes for session in sessions)
        texts = sum(len(text.encode()) for session in sessions for text in session.values.values())
        bodies = sum(call.held_bytes for session in sessions for call in session.calls.values())
        begun = sum(call.text.size_bytes for session in sessions for call in session.calls.values())
        assert tenant.held_bytes == texts + bodies + begun + tenant.answer_bytes
    check(all_sessions.deleted)
    assert (
        all_sessions._count
        == len(list(all_sessions))
        == len({id(entry[2]) for entry in all_sessions._due if not entry[2].ended})
    )
    for session in all_sessions:
        check(session)


@check.register
def _(executor: Executor) -> None:
    check(executor.sessions)
    assert executor._after.homes == {call: session for session in executor.sessions for call in session.calls.values()}


@check.register
def _(refinable: RefinableCalls) -> None:
    assert refinable._handles == {key: handle for handle, calls in refinable._calls.items() for key in calls}
    assert all(refinable._calls.values())
    assert len(refinable._early) <= EARLY_CHANGES


@check.register
def _(cache: BlockCache) -> None:
    references, hashes = cache._references, cache._hashes
    assert min(references) >= 0
    assert len(cache._free) == references.count(0)
    assert not any(map(references.__getitem__, cache._free))
    assert len(cache._by_hash) == len(hashes) - hashes.count(None)
    assert list(map(hashes.__getitem__, cache._by_hash.values())) == list(cache._by_hash)
    assert cache.cached_blocks == len(cache._free) - list(map(hashes.__getitem__, cache._free)).count(None)


@check.register
def _(blocks: KvBlocks) -> None:
    check(blocks.cache)
    for number, tier in enumerate(blocks.lower._tiers, 1):
        assert len(tier.blocks) <= tier.total_blocks
        ends = [one for one in tier.blocks if one not in blocks.cache and blocks.lower.fastest(one) == number]
        holders = [blocks._named[one] for one in ends if one in blocks._named]
        faster = {
            block for named in blocks._named.values() if (named.tier or 0) < number for block in named.tree_blocks
        }
        here = {block for named in holders for block in named.tree_blocks}
        assert here - faster == set(tier.told.journal.stored)


def counted(offers: Offers) -> dict[Need, int]:
    """The number of links for each need."""
    found: dict[Need, int] = {
        Stage(awaited, distance): links
        for awaited, distances in offers._links.items()
        for distance, links in distances.items()
    }
    return found | ({Objective.THROUGHPUT: offers._throughput_links} if offers._throughput_links else {})
