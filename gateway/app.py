"""Builds the gateway from its configuration, as one ASGI application: the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp

from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.admission.tenants import TenantIds
from plait.gateway.api.admin import AdminApi
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.background_api import BackgroundApi
from plait.gateway.api.behind_a_proxy import behind_a_proxy
from plait.gateway.api.call_api import CallApi, StepBefore
from plait.gateway.api.error_answers import ANSWERS, UNKNOWN_PATH, SlowClientMetrics
from plait.gateway.api.operations import About, Operations
from plait.gateway.api.own_routes import OwnRoutes
from plait.gateway.api.owned_sessions import OwnedSessions
from plait.gateway.api.program_api import ProgramApi
from plait.gateway.api.program_calls import ProgramCalls
from plait.gateway.api.response_routes import ResponsesApi
from plait.gateway.api.semantic_api import SemanticApi
from plait.gateway.api.shared_engines import SharedEngines
from plait.gateway.api.translated_api import TRANSLATED, TranslatedApi
from plait.gateway.calls.sealed_thoughts import SealedThoughts
from plait.gateway.calls.stored_responses import ResponsesCollector, StoredResponses
from plait.gateway.chaining.chained_calls import ChainedCalls
from plait.gateway.chaining.metrics import ProgramMetrics, SessionCollector
from plait.gateway.config.sections import Config
from plait.gateway.discovery import Discovery
from plait.gateway.durability.durability import new_durability
from plait.gateway.found_config import FoundConfig
from plait.gateway.kernel import Kernel
from plait.gateway.live.feed import Feed
from plait.gateway.live.routes import LiveApi
from plait.gateway.live.signs import SeenFleet
from plait.gateway.live.status import StatusApi, Watched
from plait.gateway.peers.forwarding import Forwarding
from plait.gateway.peers.membership import Membership
from plait.gateway.peers.metrics import MembershipCollector
from plait.gateway.peers.peer_front import PeerFront
from plait.gateway.peers.peers import ALONE, Peers
from plait.gateway.peers.session_routes import SessionRoutes
from plait.gateway.peers.signatures import ADMIN_KEY, METRICS_KEY
from plait.gateway.programs.executor import Executor
from plait.gateway.receipts.explain import ExplainApi
from plait.gateway.receipts.receipts import Receipts
from plait.gateway.receipts.routes import ReceiptsApi
from plait.gateway.receipts.told import ToldReceipt
from plait.gateway.reloading import Reloading
from plait.gateway.server.open_requests import OpenRequests
from plait.gateway.shared_limits import SharedLimits
from plait.gateway.store.metrics import StoreCollector
from plait.gateway.timer import at_loop_time

FIRST_LOOK_S: Final = 2.0
"""The longest time that one of several gateways waits for a first engine before it takes requests."""


class Gateway:
    """The kernel with its guests, and `app`, the ASGI application.

    Processes with the same `secret` (None: a random one) derive the same tenant identities, and read the same seals.
    `save_to` is the file for `plait serve --save`, `peers` are the gateways that serve the same clients. Raises
    ValueError for tokenizers, profiles or certificates that cannot be loaded.
    """

    def __init__(
        self, config: Config, secret: bytes | None = None, save_to: Path | None = None, peers: Peers = ALONE
    ) -> None:
        self.config = config
        self._durability = new_durability(config)
        self._forwarding = forwarding = self._new_forwarding(peers)
        self._save_to = save_to
        secret = secret or token_bytes(32)
        self._thoughts = SealedThoughts(secret)
        self._receipts = Receipts(config.receipts.max_bytes)
        peers = forwarding.peers
        self.kernel = kernel = Kernel(
            config,
            TenantIds(secret),
            readers=(self._receipts,) if config.receipts.max_bytes else (),
            told_receipt=partial(ToldReceipt, receipts=self._receipts),
            gateways=peers.count,
            index=peers.index,
            workers=1 if peers.share else peers.count,
        )
        self.router, self.engines, self.bodies = kernel.router, kernel.engines, kernel.bodies
        self.on_slow_client = SlowClientMetrics(kernel.registry).dropped
        self._stored = self._new_stored()
        self._chained = self._new_programs()
        admin = KeyRing(filter(None, [config.server.admin_key]), name=ADMIN_KEY)
        self._admin = AdminAccess(admin, config.server.admin_port)
        self._discovery = Discovery(config.services, kernel.engines, kernel.supervisor)
        self._reloading = Reloading(
            config, kernel.engines, kernel.keys, self._admin.keys, kernel.terms, registry=kernel.registry
        )
        self._feed = Feed(kernel.router, kernel.relay, kernel.tenants.label)
        self._watched = self._new_watched()
        self._rest = self._new_rest()
        self._requests = OpenRequests(self._new_routes(), kernel.refusals.outermost)
        self.app = behind_a_proxy(self._requests, config.server.root_path, config.server.cors_origins)

    def _new_forwarding(self, peers: Peers) -> Forwarding:
        if (self.config.server.advertise_url or "").startswith("https:"):
            SYSTEM_TRUST.load()  # the other gateways' addresses are like its own, and not known yet
        return Forwarding(peers, None if self._durability is None else self._durability.membership)

    def _new_stored(self) -> StoredResponses:
        limits = self.config.sessions
        stored = StoredResponses(limits.max_response_bytes, limits.ttl_s, self._durability)
        self.kernel.registry.register(ResponsesCollector(stored))
        return stored

    def _new_programs(self) -> ChainedCalls:
        kernel, limits = self.kernel, self.config.sessions
        metrics = ProgramMetrics(kernel.registry, kernel.tenants.label)
        executor = Executor(limits, kernel.router.predicted_s, at_loop_time, metrics.job_ended, self._durability)
        if not self._forwarding.is_alone:
            executor.sessions.is_own = self._forwarding.peers.is_own
        kernel.registry.register(SessionCollector(executor.sessions, executor.variables.counts))
        return ChainedCalls(executor, kernel.reader, kernel.relay, metrics, kernel.bodies, stored=self._stored)

    def _new_watched(self) -> Watched:
        kernel, models = self.kernel, [model.name for model in self.config.models]
        seen = SeenFleet(
            kernel.router, kernel.admission, kernel.metrics, kernel.tenants.label, models, self._reloading,
            self._durability,
        )  # fmt: skip
        watched = Watched(seen)
        kernel.registry.register(watched)
        return watched

    def _new_routes(self) -> ASGIApp:
        """All routes. Calls go straight to the data path, all other requests through Starlette."""
        kernel, forwarding, background = self.kernel, self._forwarding, BackgroundApi(self._chained)
        rest: ASGIApp = self._rest
        before: list[StepBefore] = [ProgramCalls(self._chained, kernel.refusals)]
        if not forwarding.is_alone:
            before.insert(0, OwnedSessions(forwarding))
            rest = self._shared_engines = SharedEngines(rest, forwarding, kernel.engines)
            rest = SessionRoutes(
                rest,
                forwarding,
                kernel.bodies,
                tenant_of=kernel.keys.check,
                check_admin=lambda scope: self._admin.check(Request(scope)),
                responses=background,
            )
        rest = OwnRoutes(rest, kernel.bodies, tenant_of=kernel.keys.check, on_refused=kernel.refusals.elsewhere)
        completions = kernel.completions(before)
        translated = TranslatedApi(completions, self._stored, self._thoughts, forwarding, background, kernel.refusals)
        preparers = dict.fromkeys(TRANSLATED, translated)
        calls = CallApi(completions, preparers, kernel.keys, kernel.bodies, kernel.refusals, rest)
        return calls if forwarding.is_alone else PeerFront(calls, forwarding, kernel.refusals.unread)

    def _new_rest(self) -> Starlette:
        kernel, config, chained, admin = self.kernel, self.config, self._chained, self._admin
        keys, bodies, keep_alive_s = kernel.keys, kernel.bodies, config.sessions.keep_alive_s
        rest = Starlette(
            routes=[
                *SemanticApi(chained, keys, bodies, keep_alive_s).routes,
                *ProgramApi(chained, keys, bodies, keep_alive_s).routes,
                *self._new_operations().routes,
                *About(kernel.router, keys, admin).routes,
                *ResponsesApi(chained, keys, bodies).routes,
                *LiveApi(kernel.router, kernel.admission, self._feed, admin, is_stopping=self._is_stopping).routes,
                *AdminApi(kernel.engines, admin, bodies).routes,
                *StatusApi(self._watched, admin, self._forwarding, self._thoughts.fingerprint).routes,
                *ReceiptsApi(self._receipts, keys, admin, kernel.tenants.label, self._forwarding).routes,
                *ExplainApi(kernel.reader, self._receipts, admin, bodies).routes,
                UNKNOWN_PATH,
            ],
            exception_handlers=ANSWERS,
            lifespan=lambda _app: self.running(),
        )
        rest.state.on_refused = kernel.refusals.elsewhere
        return rest

    def _new_operations(self) -> Operations:
        kernel = self.kernel
        return Operations(
            kernel.router,
            self.config.models,
            kernel.keys,
            kernel.registry,
            metrics_keys=KeyRing(filter(None, [self.config.server.metrics_key]), name=METRICS_KEY),
            awaited=kernel.tokenizers.awaited,
            is_stopping=self._is_stopping,
            membership=self._forwarding.membership,
        )

    def _is_stopping(self) -> bool:
        return self._requests.stopping

    def needs_keys(self) -> bool:
        """Whether a call needs an API key."""
        return not self.kernel.keys.is_open

    def reload(self, load: Callable[[], Config]) -> None:
        """Read the configuration again, and apply what can change at run time. Logs errors; drops no call."""
        self._reloading.reload(load)

    # The gateway stops in three steps.

    def begin_stop(self) -> None:
        """From now on `/ready` answers 503, so that load balancers stop sending. Calls are still served."""
        self._requests.stopping = True
        if self._durability is not None:
            self._durability.hand_over(self._chained.runner)

    def on_closed(self) -> None:
        """The server takes no more requests. Clients that would wait for one get a 503."""
        self._chained.give_up_stranded()

    def cut(self) -> None:
        """End every remaining request: with a 503, or if its stream has begun, with an error event."""
        self.kernel.relay.is_stopping = True
        self._requests.cut()

    def _join(self, membership: Membership) -> None:
        """Be one of the gateways of a shared store."""
        kernel, sessions = self.kernel, self._chained.executor.sessions
        kernel.registry.register(MembershipCollector(membership))
        shared = SharedLimits(
            membership, self._forwarding, router=kernel.router, admission=kernel.admission, terms=kernel.terms,
            sessions=sessions,
        )  # fmt: skip
        shared.begin(kernel.gate, kernel.supervisor)

    async def _until_an_engine_answers(self) -> None:
        """Wait, for `FIRST_LOOK_S` at most, until an engine has answered: before, every call would be refused."""
        for _ in range(100):
            if self.router.models.names:
                break
            await asyncio.sleep(FIRST_LOOK_S / 100)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The background tasks of the gateway run within this context."""
        kernel, supervisor = self.kernel, self.kernel.supervisor
        kernel.open()
        self._discovery.open()
        supervisor.start("problems", self._watched.watch)
        supervisor.start("sessions-expire", self._chained.expire)
        if self._save_to is not None:
            found = FoundConfig(self.config, self.router, kernel.tokenizers.specification)
            supervisor.start("save", partial(found.save, self._save_to))
        if self._durability is not None:
            kernel.registry.register(StoreCollector(self._durability.log))
            kernel.registry.register(self._durability.damage)
            recover = partial(self._durability.recover, self._chained.runner, self._stored, self.router)
            supervisor.start("store", recover)
        if self._forwarding.membership is not None:
            self._join(self._forwarding.membership)
        if not self._forwarding.is_alone:
            if not self._forwarding.peers.share:
                await self._shared_engines.take_over()
            await self._until_an_engine_answers()
        yield
        self.kernel.relay.is_stopping = True
        if self._durability is not None:
            self._durability.freeze()
        await self._chained.close()
        await self._forwarding.aclose()
        if self._durability is not None:
            await self._durability.close()
        await kernel.close()
