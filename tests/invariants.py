"""The invariants of data structures, which tests assert after each step: `check(graph)`.

A structure that counts something outside itself has a function of its own, which gets that too: `check_admission`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import singledispatch
from itertools import pairwise
from math import inf

from plait.backends.adapter.state_reporter import EARLY_CHANGES, RefinableCalls
from plait.gateway.admission.admission import Admission, SessionGates
from plait.gateway.admission.backlog import Backlog, Waiting
from plait.gateway.admission.lines import Lines
from plait.gateway.admission.queue import Queue
from plait.gateway.fleet.booking import Progress
from plait.gateway.fleet.engine import FleetEngine
from plait.gateway.fleet.others_calls import OthersCalls
from plait.gateway.fleet.router import RetryBudgets, Router
from plait.gateway.guests.programs.core.executor import Executor
from plait.gateway.guests.programs.core.session import Session
from plait.gateway.guests.programs.core.sessions import DeletedSessions, Sessions
from plait.lab.embedded.kv_blocks import BlockCache, KvBlocks
from plait.policy.costs.engine_view import sent_calls
from plait.policy.costs.load import LoadLedger
from plait.policy.costs.prefill_queue import Precedence, PrefillQueue
from plait.policy.costs.situation import Demand
from plait.policy.prefix.prefix_tree import NO_BRANCHES, NO_HOLDINGS, Holding, Node, PrefixTree
from plait.policy.prefix.residency import Residency
from plait.policy.prefix.reuse_distances import ReuseDistances
from plait.policy.programs.needs import Marks, Need, Needs, Offers, Stage, Stages
from plait.policy.programs.objectives import NOTHING, CriticalPaths, Deductions
from plait.policy.programs.request_graph import RequestGraph
from plait.policy.programs.request_graph_state import CallNode, CallState, VariableNode, VariableState
from plait.policy.sessions.live import LiveSessions
from plait.policy.sessions.session_gate import HeldTurns, SessionGate
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


@check.register
def _(tree: PrefixTree) -> None:
    blocks, ends = 0, defaultdict[str, dict[int, Node]](dict)
    assert not NO_BRANCHES
    assert not NO_HOLDINGS
    for node in tree.nodes():
        blocks += len(node)
        assert len(node) > 0
        assert node.parent is not None
        assert node.parent.children[node.hashes[0]] is node
        assert node.start_blocks == node.parent.end_blocks
        for engine_id, holding in node.holdings.items():
            check_holding(holding, node)
            if holding.resident_blocks:
                ends[engine_id][node.hashes[holding.resident_blocks - 1]] = node
    assert blocks == len(tree)
    assert ends == {engine_id: nodes for engine_id, nodes in tree.ends.items() if nodes}


def check_holding(holding: Holding, node: Node) -> None:
    """Assert the invariants of what an engine has of this node."""
    assert holding.node is node
    assert holding, f"an empty holding was left on {node}"
    assert 0 <= holding.resident_blocks <= len(node)
    assert 0 <= holding.leaving_blocks <= holding.resident_blocks
    assert 0 <= holding.waiting <= holding.bookings
    assert not holding.ends >> holding.resident_blocks
    assert not holding.expected_ends >> len(node)
    assert holding.sharers >= 0
    in_order = (holding.newer is not None, holding.older is not None)
    assert in_order == (holding.is_cached, holding.is_cached), f"{node}: in the order of use or not?"


@check.register
def _(residency: Residency) -> None:
    """The total and the order of use agree with the tree, no prefix has a gap, and a lower tier covers a faster one."""
    resident, tree = residency.resident, residency._tree
    if residency.lower is not None:
        assert all(residency.lower.resident.of(node) >= resident.of(node) for node in tree.nodes())
        check(residency.lower)
    nodes = [node for node in tree.nodes() if residency.engine_id in node.holdings]
    assert resident.blocks == sum(resident.of(node) for node in nodes)
    ordered, free = list(residency._order), list(residency._order.free())
    assert not any(holding.bookings for holding in free)
    assert all(one.used <= next_one.used for one, next_one in pairwise(free))
    position = {holding.node: place for place, holding in enumerate(ordered)}
    assert position.keys() == {node for node in nodes if node.holdings[residency.engine_id].is_cached}
    assert all(holding is holding.node.holdings[residency.engine_id] for holding in ordered)
    for node, place in position.items():
        parent = node.parent
        assert parent is not None
        if parent is not tree.root:
            assert position[parent] > place, "an ancestor would be evicted first"
            assert not resident.of(node) or resident.of(parent) == len(parent), "a gap before a resident node"


@check.register
def _(distances: ReuseDistances) -> None:
    assert len(distances._last) == len(distances._blocks) <= distances._most
    assert [distances._last[block] for block in distances._blocks] == distances._stamps == sorted(distances._stamps)


@check.register
def _(ledger: LoadLedger) -> None:
    assert abs(ledger._prefill_s - sum(entry.prefill_s for entry in ledger._entries)) < 1e-6
    assert ledger._prompt_tokens == sum(entry.prompt_tokens for entry in ledger._entries)
    ended = [entry.output_tokens for entry in ledger._entries if entry.output_tokens is not None]
    assert (ledger._outputs, ledger._output_tokens) == (len(ended), sum(ended))


@check.register
def _(queue: PrefillQueue) -> None:
    unsent, sent = list(queue._unsent), list(queue._sent)
    waiting = [*unsent, *sent]
    for prefills, tokens, attention_s in (
        (waiting, queue.tokens, queue.attention_s),
        (sent, queue.sent_tokens, queue.sent_attention_s),
    ):
        assert tokens == sum(prefill.tokens for prefill in prefills)
        assert abs(attention_s - sum(prefill.attention_s for prefill in prefills)) < 1e-6 or not prefills
    assert (queue.unsent, queue.sent) == (len(unsent), len(sent))
    assert queue.oldest is next(iter(sent), None)
    assert queue.expires_s == (queue._whole[0][0] if queue._whole else inf)
    assert queue.on_time_tokens == sum(prefill.tokens for prefill in waiting if prefill.is_on_time)
    for precedence, tokens in enumerate(queue.tokens_of):
        assert tokens == sum(prefill.tokens for prefill in sent if prefill.precedence == precedence)
    assert set(queue._rest) == {prefill for prefill in sent if prefill.precedence is Precedence.REST}
    assert set(queue._on_time) == {prefill for prefill in sent if prefill.precedence is Precedence.ON_TIME}
    assert queue.tenants == Counter(prefill.tenant for prefill in sent)
    watched = {prefill for _, _, prefill in queue._begin_by}
    assert all(prefill in watched for prefill in waiting if prefill.is_on_time and prefill.due_s < inf)
    assert abs(queue._sent_time_s - sum(prefill.time_s for prefill in sent)) < 1e-6 or not sent
    assert abs(queue._own_time_s - sum(prefill.time_s for prefill in sent if prefill.is_own)) < 1e-6


@check.register
def _(others: OthersCalls) -> None:
    """The engine's view counts these calls."""
    assert others._view.reported == len(others._calls)
    assert others._gateways == Counter(other.gateway for other in others._calls.values())
    assert others._view.gateways == 1 + len(others._gateways)


@check.register
def _(engine: FleetEngine) -> None:
    view = engine.view
    check(view.residency)
    check(view.ledger)
    assert view.calls >= view.outstanding + view.others + view.reported
    assert view.outstanding + view.reported >= len(view.queue)
    assert 0 <= view.unsent_context_tokens <= view.context_tokens + 1e-6
    check(engine.cache.others)
    check_progress(engine.progress, sent_calls(view))
    check(view.queue)


def check_progress(progress: Progress, bookings: int) -> None:
    """Assert the invariants for an engine with this many calls."""
    waiting = list(progress.waiting)
    assert len(waiting) + len(progress._streaming) == bookings
    assert abs(progress._prefill_s - sum(booking.prefill.time_s for booking in waiting)) < 1e-6 or not waiting


@check.register
def _(router: Router) -> None:
    check(router.tree)
    for engine in router.engines.values():
        check(engine)
    outstanding = sum(engine.view.outstanding for engine in router.engines.values())
    check_retries(router.retries, outstanding)
    check_demand(router.demand, outstanding)


def check_retries(retries: RetryBudgets, active_calls: int) -> None:
    """Assert the invariants for a fleet with this many calls on its engines."""
    assert sum(retries._active.values()) == active_calls
    assert all(count >= 0 for count in (*retries._active.values(), *retries._retrying.values()))


def check_demand(demand: Demand, active_calls: int) -> None:
    """Assert the invariants for a fleet with this many calls on its engines."""
    assert all(count > 0 for count in demand._groups.values())
    assert demand._groups.total() <= active_calls


@check.register
def _(live: LiveSessions) -> None:
    contexts = [context for session in live for context in session.contexts]
    assert all(session.is_live for session in live)
    assert live._uses == Counter(one for context in contexts for one in context.hashes)
    assert live._rest == sum(one.tokens - len(one.hashes) * live._block_tokens for one in contexts)
    of_tenant = Counter[str]()
    for context in contexts:
        of_tenant[context.session.tenant] += context.tokens
    assert +live._of_tenant == +of_tenant


@check.register
def _(held: HeldTurns) -> None:
    assert all(held.turns.values())
    for tenant, turns in held.turns.items():
        assert all(turn.is_held and turn.asked.tenant == tenant for turn in turns)
        assert turns == sorted(turns, key=lambda one: one.session.born_s)


@check.register
def _(gate: SessionGate) -> None:
    check(gate.live)
    check(gate.held)
    assert set(gate.live) <= set(gate.known)
    assert sum(session.held for session in gate.known) == len(gate.held)
    assert all(session.calls >= 0 for session in gate.known)
    assert gate._chatting_tokens >= 0


@check.register
def _(backlog: Backlog) -> None:
    calls = [call for tenant in backlog._tenants.values() for call in tenant.calls]
    assert backlog.length == len(calls)
    assert abs(backlog.work_s - sum(call.work_s for call in calls)) < 1e-6
    assert all(call.tenant == name for name, tenant in backlog._tenants.items() for call in tenant.calls)


def check_admission(admission: Admission, entered: Iterable[Waiting]) -> None:
    """Assert the invariants, with all calls that have entered and not left."""
    calls = list(entered)
    check_queue(admission.queue, [call for call in calls if not call.is_held and call not in admission._paced])
    check_gates(admission.sessions, calls)
    running = {call.tenant for call in calls if call.booking is not None}
    assert all(tenant in running for tenant, use in admission._uses.items() if use.running)


def check_gates(gates: SessionGates, entered: Iterable[Waiting]) -> None:
    """Assert the invariants, with all calls that have entered and not left."""
    assert gates._held == {call.turn: call for call in entered if call.turn is not None and call.turn.is_held}
    for gate in gates.gates.values():
        check(gate)


def check_queue(queue: Queue, calls: Sequence[Waiting]) -> None:
    """Assert the invariants, with all calls that wait or run; failed ones may be among them."""
    waiting = [call for call in calls if not call.is_sent and call.error is None]
    assert len(waiting) == sum(backlog.length for backlog in queue.backlogs.values())
    for backlog in queue.backlogs.values():
        check(backlog)
    queue._conversations.check((call.tenant, call.conversation) for call in waiting)
    check_lines(queue.lines, [call for call in waiting if call.booking is not None])
    placed = Counter(call.tenant for call in calls if call.booking is not None)
    assert all(queue._uses[tenant].running == running for tenant, running in placed.items())


def check_lines(lines: Lines, waiting: Sequence[Waiting]) -> None:
    """Assert the invariants, with the calls that are placed and wait."""
    assert lines._router.waiting == len(waiting) == sum(map(len, lines._lines.values()))
    assert all(call in lines._lines[call.engine_id] for call in waiting)
    for line in lines._lines.values():
        line.check()


def counted(offers: Offers) -> dict[Need, int]:
    """The number of links for each need."""
    found: dict[Need, int] = {
        Stage(awaited, distance): links
        for awaited, distances in offers._links.items()
        for distance, links in distances.items()
    }
    return found | ({Objective.THROUGHPUT: offers._throughput_links} if offers._throughput_links else {})
