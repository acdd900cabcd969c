"""Builds the gateway from its configuration, as one ASGI application: the composition root."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from pathlib import Path
from secrets import token_bytes
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import ASGIApp

from plait.backends.http.trust import SYSTEM_TRUST
from plait.gateway.admission.admission import Admission
from plait.gateway.admission.metrics import AdmissionCollector
from plait.gateway.admission.tenants import TenantIds, TenantTerms
from plait.gateway.api.admin import AdminApi
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.background_api import BackgroundApi
from plait.gateway.api.behind_a_proxy import behind_a_proxy
from plait.gateway.api.call_api import CallApi, CompletionApi, StepBefore
from plait.gateway.api.error_answers import ANSWERS, UNKNOWN_PATH, SlowClientMetrics
from plait.gateway.api.operations import About, Operations
from plait.gateway.api.own_routes import OwnRoutes
from plait.gateway.api.owned_sessions import OwnedSessions
from plait.gateway.api.program_api import ProgramApi
from plait.gateway.api.program_calls import ProgramCalls
from plait.gateway.api.refusals import Refusals
from plait.gateway.api.response_routes import ResponsesApi
from plait.gateway.api.semantic_api import SemanticApi
from plait.gateway.api.shared_engines import SharedEngines
from plait.gateway.api.translated_api import TRANSLATED, TranslatedApi
from plait.gateway.calls.call_reader import CallReader, PromptReader
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallLog, CallRecords
from plait.gateway.calls.relay import Relay
from plait.gateway.calls.sealed_thoughts import SealedThoughts
from plait.gateway.calls.stored_responses import ResponsesCollector, StoredResponses
from plait.gateway.calls.tokenizer_metrics import TokenizerCollector
from plait.gateway.chaining.chained_calls import ChainedCalls
from plait.gateway.chaining.metrics import ProgramMetrics, SessionCollector
from plait.gateway.config.sections import Config
from plait.gateway.discovery import Discovery
from plait.gateway.durability.durability import new_durability
from plait.gateway.fleet.guarded_policy import guarded
from plait.gateway.fleet.metrics import FleetCollector, HealthMetrics
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.served_models import ModelNames
from plait.gateway.fleet.tokenizer_agreement import TokenizerAgreements
from plait.gateway.found_config import FoundConfig
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.live.feed import Feed
from plait.gateway.live.routes import LiveApi
from plait.gateway.live.signs import SeenFleet
from plait.gateway.live.status import StatusApi, Watched
from plait.gateway.log.events import LogCollector
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.engine_set import EngineSet
from plait.gateway.membership.hub_downloads import HubDownloads
from plait.gateway.membership.monitor import Monitor
from plait.gateway.membership.recovery import Recovery
from plait.gateway.membership.tokenizer_search import TokenizerSearch
from plait.gateway.metrics import new_registry
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
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import at_loop_time, loop_time_s
from plait.policy.placement.policies import POLICIES

FIRST_LOOK_S: Final = 2.0
"""The longest time that one of several gateways waits for a first engine before it takes requests."""


class Gateway:
    """The parts of a gateway, and `app`, the ASGI application.

    Processes with the same `secret` (None: a random one) derive the same tenant identities, and read the same seals.
    `save_to` is the file for `plait serve --save`, `peers` are the gateways that serve the same clients. Raises
    ValueError for tokenizers, profiles or certificates that cannot be loaded.
    """

    def __init__(
        self, config: Config, secret: bytes | None = None, save_to: Path | None = None, peers: Peers = ALONE
    ) -> None:
        self.config = config
        self._durability = new_durability(config)
        self._forwarding = self._new_forwarding(peers)
        self._save_to = save_to
        self.router = build_router(config)
        secret = secret or token_bytes(32)
        self._tenants, self._thoughts = TenantIds(secret), SealedThoughts(secret)
        self._keys = KeyRing(config.server.api_keys, config.tenants, self._tenants)
        self._terms = new_terms(config, self._tenants, self._forwarding.peers)
        admin = KeyRing(filter(None, [config.server.admin_key]), name=ADMIN_KEY)
        self._admin = AdminAccess(admin, config.server.admin_port)
        self._links: dict[str, EngineLink] = {}
        self._reader = reader = self._new_reader()
        self._registry = new_registry()
        self.on_slow_client = SlowClientMetrics(self._registry).dropped
        programs = ProgramMetrics(self._registry, self._tenants.label)
        executor = self._new_executor(programs)
        self._stored = self._new_stored()
        for collector in (LogCollector(), FleetCollector(self.router), TokenizerCollector(self.tokenizers)):
            self._registry.register(collector)
        self._supervisor = Supervisor(self._registry)
        self.downloads = HubDownloads(self.tokenizers, self._supervisor)
        self._recovery = self._new_recovery()
        self._monitor = self._new_monitor()
        self.engines = self._new_engines()
        self._discovery = self._new_discovery()
        self._reloading = Reloading(
            config, self.engines, self._keys, self._admin.keys, self._terms, registry=self._registry
        )
        self._relay = relay = self._new_relay()
        self.bodies = new_bodies(config, self._forwarding.peers)
        self._chained = ChainedCalls(executor, reader, relay, programs, self.bodies, stored=self._stored)
        completions = CompletionApi(reader, relay, self._new_steps())
        self._rest = self._new_rest()
        self._requests = OpenRequests(self._new_routes(completions), self.refusals.outermost)
        self.app = behind_a_proxy(self._requests, config.server.root_path, config.server.cors_origins)

    def _new_reader(self) -> CallReader:
        prompts = PromptReader(self.config, self.router.block_tokens, self.router.models.base)
        self.tokenizers = prompts.tokenizers
        return CallReader.of(self.router, prompts, self.config.server)

    def _new_forwarding(self, peers: Peers) -> Forwarding:
        if (self.config.server.advertise_url or "").startswith("https:"):
            SYSTEM_TRUST.load()  # the other gateways' addresses are like its own, and not known yet
        return Forwarding(peers, None if self._durability is None else self._durability.membership)

    def _new_engines(self) -> EngineSet:
        return EngineSet(
            self.config, self.router, self._links, self._monitor, self._recovery, supervisor=self._supervisor
        )

    def _new_discovery(self) -> Discovery:
        return Discovery(self.config.services, self.engines, self._supervisor)

    def _new_executor(self, programs: ProgramMetrics) -> Executor:
        limits, predicted_s = self.config.sessions, self.router.predicted_s
        executor = Executor(limits, predicted_s, at_loop_time, programs.job_ended, self._durability)
        if not self._forwarding.is_alone:
            executor.sessions.is_own = self._forwarding.peers.is_own
        self._registry.register(SessionCollector(executor.sessions, executor.variables.counts))
        return executor

    def _new_stored(self) -> StoredResponses:
        limits = self.config.sessions
        stored = StoredResponses(limits.max_response_bytes, limits.ttl_s, self._durability)
        self._registry.register(ResponsesCollector(stored))
        return stored

    def _new_steps(self) -> list[StepBefore]:
        """What comes before a completion with annotations becomes a call."""
        programs = ProgramCalls(self._chained, self.refusals)
        return [programs] if self._forwarding.is_alone else [OwnedSessions(self._forwarding), programs]

    def _new_routes(self, completions: CompletionApi) -> ASGIApp:
        """All routes. Calls go straight to the data path, all other requests through Starlette."""
        keys, forwarding, bodies = self._keys, self._forwarding, self.bodies
        background, rest = BackgroundApi(self._chained), self._rest
        own: ASGIApp = rest
        if not forwarding.is_alone:
            self._shared_engines = SharedEngines(rest, forwarding, self.engines)
            own = SessionRoutes(
                self._shared_engines,
                forwarding,
                bodies,
                tenant_of=keys.check,
                check_admin=lambda scope: self._admin.check(Request(scope)),
                responses=background,
            )
        own = OwnRoutes(own, bodies, tenant_of=keys.check, on_refused=self.refusals.elsewhere)
        translated = TranslatedApi(completions, self._stored, self._thoughts, forwarding, background, self.refusals)
        calls = CallApi(completions, dict.fromkeys(TRANSLATED, translated), keys, bodies, self.refusals, own)
        return calls if forwarding.is_alone else PeerFront(calls, forwarding, self.refusals.unread)

    def _new_rest(self) -> Starlette:
        live = LiveApi(
            self.router, self._admission, self._feed, self._admin, is_stopping=lambda: self._requests.stopping
        )
        rest = Starlette(
            routes=[
                *SemanticApi(self._chained, self._keys, self.bodies, self.config.sessions.keep_alive_s).routes,
                *ProgramApi(self._chained, self._keys, self.bodies, self.config.sessions.keep_alive_s).routes,
                *self._new_operations().routes,
                *About(self.router, self._keys, self._admin).routes,
                *ResponsesApi(self._chained, self._keys, self.bodies).routes,
                *live.routes,
                *AdminApi(self.engines, self._admin, self.bodies).routes,
                *StatusApi(self._watched, self._admin, self._forwarding, self._thoughts.fingerprint).routes,
                *ReceiptsApi(self._receipts, self._keys, self._admin, self._tenants.label, self._forwarding).routes,
                *ExplainApi(self._reader, self._receipts, self._admin, self.bodies).routes,
                UNKNOWN_PATH,
            ],
            exception_handlers=ANSWERS,
            lifespan=lambda _app: self.running(),
        )
        rest.state.on_refused = self.refusals.elsewhere
        return rest

    def _new_operations(self) -> Operations:
        return Operations(
            self.router,
            self.config.models,
            self._keys,
            self._registry,
            metrics_keys=KeyRing(filter(None, [self.config.server.metrics_key]), name=METRICS_KEY),
            awaited=self.tokenizers.awaited,
            is_stopping=lambda: self._requests.stopping,
            membership=self._forwarding.membership,
        )

    def _new_relay(self) -> Relay:
        metrics = CallMetrics(self._registry, self._tenants.label)
        self._receipts = Receipts(self.config.receipts.max_bytes)
        kept = (self._receipts,) if self.config.receipts.max_bytes else ()
        records = CallRecords((metrics, CallLog(self._tenants.label), *kept))
        self._admission = self._new_admission()
        self._gate = Gate(self._admission, self.config.admission.hold_s)
        relay = Relay(
            self.router,
            self._links,
            self._recovery,
            self._gate,
            metrics,
            records=records,
            objectives=ChangedObjectives(self.router, self._admission, self._links, self._supervisor, self._registry),
            max_attempts=self.config.upstream.max_attempts,
            open_answers=OpenAnswers(self.config.upstream.max_open_answer_bytes),
            forward_client_key=self._keys.is_open,
            told_receipt=partial(ToldReceipt, receipts=self._receipts),
        )
        self._feed = Feed(self.router, relay, self._tenants.label)
        self._watched = self._new_watched(metrics)
        self.refusals = Refusals(
            records, metrics, self._gate, self.router.models, self._keys, root_path=self.config.server.root_path
        )
        return relay

    def _new_watched(self, metrics: CallMetrics) -> Watched:
        models, reloading = [model.name for model in self.config.models], self._reloading
        seen = SeenFleet(
            self.router, self._admission, metrics, self._tenants.label, models, reloading, self._durability
        )
        watched = Watched(seen)
        self._registry.register(watched)
        return watched

    def _new_admission(self) -> Admission:
        config = self.config.admission
        admission = Admission(
            self.router,
            at_loop_time,
            self._terms.limits,
            max_wait_s=config.max_wait_s,
            weights=self._terms.weights,
            ahead_s=config.ahead_s,
            chat_tokens=config.chat_tokens if config.sessions and self.router.policy.keeps_sessions else inf,
        )
        if not self._forwarding.is_alone:
            admission.sessions.part = lambda _model: 1 / self._forwarding.peers.count
        self._registry.register(AdmissionCollector(admission, self._tenants.label))
        self._terms.on_change = lambda: admission.limits_changed(loop_time_s())
        return admission

    def _new_recovery(self) -> Recovery:
        return Recovery(
            self.router,
            self._links,
            self._supervisor,
            HealthMetrics(self._registry),
            trial_timeout_s=self.config.upstream.probe_timeout_s,
            hang_timeout_s=self.config.upstream.hang_timeout_s,
        )

    def _new_monitor(self) -> Monitor:
        contexts = {model.name: model.max_context_tokens for model in self.config.models if model.max_context_tokens}
        tokenizers = self.tokenizers
        return Monitor(
            self.router,
            self.config.engines,
            self.config.upstream,
            contexts,
            agreements=TokenizerAgreements(tokenizers.fingerprint, tokenizers.requested),
            search=TokenizerSearch.of(self.config, tokenizers, self.downloads),
            supervisor=self._supervisor,
            on_change=self._recovery.on_change,
        )

    def needs_keys(self) -> bool:
        """Whether a call needs an API key."""
        return not self._keys.is_open

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
        self._relay.is_stopping = True
        self._requests.cut()

    def _join(self, membership: Membership) -> None:
        """Be one of the gateways of a shared store."""
        self._registry.register(MembershipCollector(membership))
        SharedLimits(
            membership,
            self._forwarding,
            router=self.router,
            admission=self._admission,
            terms=self._terms,
            sessions=self._chained.executor.sessions,
        ).begin(self._gate, self._supervisor)

    async def _until_an_engine_answers(self) -> None:
        """Wait, for `FIRST_LOOK_S` at most, until an engine has answered: before, every call would be refused."""
        for _ in range(100):
            if self.router.models.names:
                break
            await asyncio.sleep(FIRST_LOOK_S / 100)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The background tasks of the gateway run within this context."""
        self.tokenizers.open()
        self._monitor.open()
        self.downloads.open()
        self._recovery.open()
        self._discovery.open()
        self._supervisor.start("silent-streams", self._relay.silent_streams.watch)
        self._supervisor.start("problems", self._watched.watch)
        self._supervisor.start("sessions-expire", self._chained.expire)
        if self._save_to is not None:
            found = FoundConfig(self.config, self.router, self.tokenizers.specification)
            self._supervisor.start("save", partial(found.save, self._save_to))
        if self._durability is not None:
            self._registry.register(StoreCollector(self._durability.log))
            self._registry.register(self._durability.damage)
            recover = partial(self._durability.recover, self._chained.runner, self._stored, self.router)
            self._supervisor.start("store", recover)
        if self._forwarding.membership is not None:
            self._join(self._forwarding.membership)
        if not self._forwarding.is_alone:
            if not self._forwarding.peers.share:
                await self._shared_engines.take_over()
            await self._until_an_engine_answers()
        yield
        self._relay.is_stopping = True
        if self._durability is not None:
            self._durability.freeze()
        await self._chained.close()
        await self._forwarding.aclose()
        if self._durability is not None:
            await self._durability.close()
        self._recovery.close()
        await self._supervisor.close()
        self.tokenizers.close()
        await self.engines.aclose()


def new_terms(config: Config, tenants: TenantIds, peers: Peers) -> TenantTerms:
    """The tenants' limits in this gateway: several gateways divide them."""
    return TenantTerms(config.admission, tenants, config.tenants, gateways=peers.count, index=peers.index)


def new_bodies(config: Config, peers: Peers) -> OpenBodies:
    """The limits on bodies. Workers on one machine divide its memory, but one body without files always fits."""
    server, workers = config.server, 1 if peers.share else peers.count
    of_tenant = max(server.max_body_bytes, server.max_open_body_bytes // workers)
    return OpenBodies(server.max_body_bytes, of_tenant, max_multipart_bytes=min(server.max_multipart_bytes, of_tenant))


def build_router(config: Config) -> Router:
    """The router for a configuration, without engines."""
    placement, engines = config.placement, (*config.engines, *config.services)
    policy = placement.new_policy()
    return Router(
        policy if placement.policy in POLICIES else guarded(policy),
        window_s=placement.window_s,
        jitter=random.random,
        wall_s=time.time,
        names=ModelNames(
            expected=[*(model.name for model in config.models), *(m for engine in engines for m in engine.models)],
            aliases={alias: model.name for model in config.models for alias in model.aliases},
            fallbacks={model.name: model.fallbacks for model in config.models},
        ),
    )
