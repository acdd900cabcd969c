"""The engines of a running gateway: added, drained, changed and removed while calls run.

`EngineSet` is the one owner of an engine's three parts: its entry in the router, its link (connections), and the
monitor's tasks. A draining engine first hands over: other engines take its prefixes, while it still gets calls for
those that only it has cached. After that it gets no calls, and it is removed when its last call has ended.

What is configured and named here is an address. A server with several data-parallel ranks has one address, and each
rank has an entry and a link of its own, under `NAME@RANK`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog

from plait.backends.errors import ConflictError, NotFoundError
from plait.backends.http.client import HttpClient, Timeouts
from plait.backends.profiles import load_profile
from plait.backends.protocol.dialects import RANK_HEADER
from plait.gateway.config.sections import DEFAULT_PROFILE, Config, EngineConfig
from plait.gateway.fleet.engine import FleetEngine, degradation, engine_status
from plait.gateway.fleet.health import Health, HealthLimits, HealthState
from plait.gateway.fleet.router import Router
from plait.gateway.membership.engine_link import EngineLink, PassedHeaders
from plait.gateway.membership.monitor import Monitor
from plait.gateway.membership.recovery import Recovery
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import loop_time_s

IDLE_S = 2.0
"""A hand-over ends early if the engine got no call for so long: its remaining prefixes are rarely used."""

LEAVE_CHECK_S = 0.02
"""The polling period for an engine that leaves."""

log = structlog.get_logger(__name__)


class Drains:
    """Drains engines. Each hands over for at most `hand_over_s`; 0: it gets no more calls at once."""

    def __init__(self, router: Router, supervisor: Supervisor, hand_over_s: float) -> None:
        self._router = router
        self._supervisor = supervisor
        self._hand_over_s = hand_over_s

    def __contains__(self, name: str) -> bool:
        return self._router.addresses[name][0].draining or self.hands_over(name)

    def hands_over(self, name: str) -> bool:
        """Whether the engine still gets calls for prefixes that only it has cached."""
        return any(rank.view.engine_id in self._router.hand_over for rank in self._router.addresses[name])

    def begin(self, name: str) -> None:
        """Drain an engine, after a hand-over if other engines serve all of its models."""
        if name in self:
            return
        alone = self.alone(name)
        (log.warning if alone else log.info)("engine draining", engine=name, alone_for=alone or None)
        if self._hand_over_s and not alone:
            for rank in self._router.addresses[name]:
                self._router.hand_over.begin(rank.view, loop_time_s())
            self._router.models.refresh()  # places the calls in the engine's queue anew
            self._supervisor.start(f"hand over:{name}", partial(self._hand_over, name))
        else:
            self.at_once(name)

    def at_once(self, name: str) -> None:
        self._end(name)
        self._router.health.drain(name)

    def cancel(self, name: str) -> None:
        self._end(name)
        self._router.health.drain(name, draining=False)
        log.info("engine active", engine=name)

    def _end(self, name: str) -> None:
        self._supervisor.cancel(f"hand over:{name}")
        for rank in self._router.addresses[name]:
            self._router.hand_over.end(rank.view.engine_id)

    async def _hand_over(self, name: str) -> None:
        hand_over, ends_s = self._router.hand_over, loop_time_s() + self._hand_over_s
        names = [rank.view.engine_id for rank in self._router.addresses[name]]
        while (left_s := min(ends_s, max(map(hand_over.latest_s, names)) + IDLE_S) - loop_time_s()) > 0:  # noqa: ASYNC110 - a call moves the end
            await asyncio.sleep(left_s)
        log.info("engine has handed over", engine=name)
        self.at_once(name)

    def alone(self, name: str) -> list[str]:
        """The engine's models for which no other engine takes calls that is not itself leaving."""
        router, ranks = self._router, self._router.addresses[name]
        own = {rank.view.engine_id for rank in ranks}
        return [
            model
            for model in ranks[0].offer.models
            if all(view.engine_id in own or view.engine_id in router.hand_over for view in router.models.able(model))
        ]


class EngineMember(msgspec.Struct, frozen=True):
    """An engine in the list that one gateway sends to another."""

    config: EngineConfig
    draining: bool
    leaves: bool


@dataclass(slots=True)
class _Member:
    """`leaves`: the engine is removed when it has no calls. `is_cut`: its connections are closed."""

    config: EngineConfig
    leaves: bool = False
    is_cut: bool = False


class EngineSet:
    """Enters the engines of `config` into the router and `links`, which has the connections to each by its id."""

    def __init__(
        self,
        config: Config,
        router: Router,
        links: dict[str, EngineLink],
        monitor: Monitor,
        recovery: Recovery,
        *,
        supervisor: Supervisor,
    ) -> None:
        self._config = config
        self._router = router
        self._links = links
        self._monitor = monitor
        self._recovery = recovery
        self._supervisor = supervisor
        self._drains = Drains(router, supervisor, config.placement.hand_over_s)
        self._members: dict[str, _Member] = {}
        self._retired: list[HttpClient] = []
        monitor.on_ranks = self.use_ranks
        for engine in config.engines:
            self._enter(engine)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def add(self, engine: EngineConfig) -> None:
        """Add an engine.

        Raises `ConflictError` if an engine has the name or the url, ValueError if its profile or the certificates to
        check it by cannot be loaded.
        """
        if engine.name in self._members:
            raise ConflictError(f"There is an engine '{engine.name}' already.", code="engine_exists", param="name")
        for other in self._members.values():
            if other.config.url == engine.url and not other.leaves:
                message = f"The engine '{other.config.name}' has this url already."
                raise ConflictError(message, code="engine_exists", param="url")
        self._enter(engine)
        self._monitor.add(engine)
        log.info("engine added", engine=engine.name, url=engine.url)

    def put(self, engine: EngineConfig) -> None:
        """Add an engine, or change the one with its name. Cancels its removal. Raises as `add` does."""
        known = self._members.get(engine.name)
        if known is None or known.is_cut:
            self.add(engine)
            return
        if known.leaves:
            self.drain(engine.name, draining=False)
        self.change(engine)

    def drain(self, name: str, *, draining: bool) -> None:
        """Drain an engine, or (`draining` False) give it calls again, which cancels its removal.

        Raises `NotFoundError`; `ConflictError` if its connections are closed already.
        """
        member = self._member(name)
        if member.is_cut:
            raise ConflictError(f"Engine '{name}' is being removed; add it again.", code="engine_busy")
        if draining:
            self._drains.begin(name)
        else:
            self._supervisor.cancel(f"leave:{name}")
            member.leaves = False
            self._drains.cancel(name)

    def change(self, engine: EngineConfig) -> None:
        """Change an engine's url, models and API key. Running calls end on their present connections.

        Raises `NotFoundError`; ValueError as `add` does.
        """
        member = self._member(engine.name)
        if member.config == engine:
            return
        engines = {one.view.engine_id: one for one in self._router.at(engine.name)}
        fresh = {name: new_link(self._config, engine, name) for name in engines}
        for name, link in fresh.items():
            engines[name].host = _host(engine)
            client = self._links[name].client
            if member.config.url == engine.url:
                self._links[name] = replace(link, client=client)
                continue
            self._links[name] = link
            client.retire()
            self._retired = [*(client for client in self._retired if not client.has_ended), client]
            self._router.no_reports(name, is_new=True)
            self._router.health.identified(name, None)
        member.config = engine
        self._monitor.remove(engine.name)
        if engine.ranks is not None:
            self.use_ranks(engine.name, engine.ranks)
        self._monitor.add(engine)
        log.info("engine changed", engine=engine.name, url=engine.url)

    def remove(self, name: str) -> None:
        """Remove a draining engine without calls. Ends its hand-over. Raises `NotFoundError` or `EngineBusyError`."""
        self._member(name)
        if self._drains.hands_over(name):
            self._drains.at_once(name)
        ranks = self._router.remove_address(name)
        self._supervisor.cancel(f"leave:{name}")
        self._forget(name, ranks)

    def leave(self, name: str, successors: Collection[str] = (), *, hands_over: bool = False) -> None:
        """Drain an engine when each of `successors` has been probed, and remove it when it has no calls.

        With `hands_over`, the drain begins with a hand-over. Raises `NotFoundError`.
        """
        member = self._member(name)
        if not member.leaves:
            member.leaves = True
            self._supervisor.start(f"leave:{name}", partial(self._leave, name, tuple(successors), hands_over))

    async def cut(self, name: str) -> None:
        """Remove an engine now. Its calls are aborted; those without a byte of an answer move to other engines.

        Raises `NotFoundError`.
        """
        member = self._member(name)
        self._drains.at_once(name)
        member.is_cut = True
        for rank in self._router.at(name):
            client = self._links[rank.view.engine_id].client
            client.lose("removed", waiting_only=False)
            client.close()
        self.leave(name)
        await _until(lambda: self._members.get(name) is not member)

    def describe(self, name: str) -> dict[str, Any]:
        """An engine as the admin API shows it: with several ranks, the state of one that takes calls, and of each.

        Raises `NotFoundError`.
        """
        member, ranks = self._member(name), self._router.addresses[name]
        engine = next((rank for rank in ranks if rank.takes_calls), ranks[0])
        shown = {
            "object": "engine",
            "name": name,
            "url": member.config.url,
            "kind": engine.kind,
            "state": "draining" if name in self._drains else "active",
            "hands_over": self._drains.hands_over(name),
            "alone_for": self._drains.alone(name),
            "leaves": member.leaves,
            **_shown(engine),
            "outstanding_calls": sum(rank.view.outstanding for rank in self._router.at(name)),
            "models": dict(engine.offer.models),
            "reports": engine.cache.reports,
            "tier": engine.tier,
        }
        return shown if len(ranks) == 1 else shown | {"ranks": {rank.view.engine_id: _shown(rank) for rank in ranks}}

    def use_ranks(self, name: str, count: int) -> None:
        """The address has this many data-parallel ranks. Each becomes an engine; engines of former ranks leave."""
        names = _ranks(name, count)
        if names == [rank.view.engine_id for rank in self._router.addresses[name]]:
            return
        if self._drains.hands_over(name):
            self._drains.at_once(name)
        for engine_id in names:
            if engine_id not in self._router.engines:
                self._link(self._members[name].config, engine_id)
        for engine in self._router.use_ranks(name, names):
            if engine.view.outstanding:
                self._supervisor.start(f"rank:{engine.view.engine_id}", partial(self._let_go, engine))
            else:
                self._router.remove_engine(engine.view.engine_id)
                self._unlink(engine)
        log.info("engine has ranks", engine=name, ranks=count)

    def describe_all(self) -> list[dict[str, Any]]:
        """Every engine as the admin API shows it, in the order in which they were added."""
        return [self.describe(name) for name in self._members]

    def members(self) -> list[EngineMember]:
        members = ((name, one) for name, one in self._members.items() if not one.is_cut)
        return [EngineMember(one.config, name in self._drains, one.leaves) for name, one in members]

    def take_over(self, members: Sequence[EngineMember]) -> None:
        """Replace all engines by those of another gateway, before this one begins to serve. Raises as `add` does."""
        for name in self._members.keys() - {one.config.name for one in members}:
            self._drains.at_once(name)
            self.remove(name)
        for one in members:
            self.put(one.config)
            if one.draining:
                self._drains.at_once(one.config.name)
            if one.leaves:
                self.leave(one.config.name)

    async def aclose(self) -> None:
        for client in (*(link.client for link in self._links.values()), *self._retired):
            await client.aclose()

    async def _leave(self, name: str, successors: Collection[str], hands_over: bool) -> None:
        addresses = self._router.addresses
        await _until(lambda: not any(map(_is_untried, (addresses.get(other) for other in successors))))
        if hands_over:
            self._drains.begin(name)
        elif not addresses[name][0].draining:
            self._drains.at_once(name)
            log.info("engine draining", engine=name)
        await _until(lambda: all(rank.draining and not rank.view.outstanding for rank in self._router.at(name)))
        self._forget(name, self._router.remove_address(name))

    async def _let_go(self, engine: FleetEngine) -> None:
        """Remove a former rank when its last call has ended, unless it has become a rank again or is gone."""
        await _until(lambda: not engine.view.outstanding)
        if engine in self._router.at(engine.address) and engine not in self._router.addresses[engine.address]:
            self._router.remove_engine(engine.view.engine_id)
            self._unlink(engine)

    def _enter(self, engine: EngineConfig) -> None:
        """Add a member. Warns of two names for one port of this machine: one engine would count twice."""
        for other in self._members.values():
            if _place(other.config.url) == _place(engine.url):
                log.warning(
                    "two engines may be one", engine=engine.name, other=other.config.name, url=engine.url,
                    hint="remove one of the two from the configuration",
                )  # fmt: skip
        for engine_id in _ranks(engine.name, engine.ranks or 1):
            self._link(engine, engine_id)
        self._members[engine.name] = _Member(engine)

    def _link(self, config: EngineConfig, engine_id: str) -> None:
        """Enter an engine of an address into the router and the links."""
        link = new_link(self._config, config, engine_id)
        enlist(self._router, self._config, config, engine_id)
        self._links[engine_id] = link

    def _forget(self, name: str, ranks: Collection[FleetEngine]) -> None:
        self._monitor.remove(name)
        for rank in ranks:
            self._unlink(rank)
        del self._members[name]
        log.info("engine removed", engine=name)

    def _unlink(self, engine: FleetEngine) -> None:
        self._recovery.remove(engine.view.engine_id)
        self._links.pop(engine.view.engine_id).client.close()

    def _member(self, name: str) -> _Member:
        member = self._members.get(name)
        if member is None:
            raise NotFoundError(f"There is no engine '{name}'.", code="engine_not_found", param="name")
        return member


def _ranks(name: str, count: int) -> list[str]:
    """The ids of an address's engines."""
    return [name] if count == 1 else [f"{name}@{rank}" for rank in range(count)]


def _shown(engine: FleetEngine) -> dict[str, Any]:
    return {**engine_status(engine), "last_error": engine.whole_error or None, "degraded": degradation(engine)}


def enlist(router: Router, config: Config, engine: EngineConfig, engine_id: str) -> None:
    """Add an engine to the router in the state `UNTRIED`. Raises ValueError if its profile cannot be loaded."""
    upstream = config.upstream
    models = engine.models or tuple(model.name for model in config.models) or ("",)
    name = config.model(models[0]).profile
    profile = load_profile(name)
    router.add_engine(
        engine_id,
        profile.cost_model(),
        kv_tokens=engine.kv_tokens,
        profile_kv_tokens=None if name == DEFAULT_PROFILE else profile.kv.tokens,
        assumed_kv_tokens=profile.kv.tokens,
        host_kv_tokens=engine.host_kv_tokens,
        health=Health(HealthLimits(probe_s=upstream.probe_interval_s, max_probe_s=3 * upstream.probe_interval_s)),
        hang_s=upstream.hang_timeout_s,
        address=engine.name,
        host=_host(engine),
    )


def _host(engine: EngineConfig) -> str:
    return urlsplit(engine.url).hostname or ""


def new_link(config: Config, engine: EngineConfig, engine_id: str) -> EngineLink:
    """A link without open connections to an engine or one of its ranks."""
    upstream = config.upstream
    timeouts = Timeouts(
        connect_s=upstream.connect_timeout_s,
        first_byte_s=upstream.first_byte_timeout_s,
        idle_s=upstream.idle_timeout_s,
    )
    client = HttpClient(engine.url, name=engine_id, timeouts=timeouts)
    rank = engine_id.removeprefix(engine.name).removeprefix("@")
    authorization = f"Bearer {engine.api_key}".encode() if engine.api_key else None
    passed = PassedHeaders.with_more(upstream.pass_request_headers, upstream.pass_response_headers)
    return EngineLink(client, authorization, passed, ((RANK_HEADER, rank.encode()),) if rank else ())


_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))


def _place(url: str) -> str:
    """An engine's url in a form that is the same for all names of the loopback interface."""
    parts = urlsplit(url)
    return f"{parts.scheme}:{parts.port}{parts.path}" if parts.hostname in _LOOPBACK else url


def _is_untried(ranks: Sequence[FleetEngine] | None) -> bool:
    return ranks is not None and ranks[0].health.state is HealthState.UNTRIED


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the router is synchronous and notifies nobody
        await asyncio.sleep(LEAVE_CHECK_S)
