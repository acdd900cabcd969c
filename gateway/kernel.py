"""The kernel: reads calls, admits, places, sends, relays and counts them, and watches engines. It knows no guest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from math import inf

from plait.gateway.admission.admission import Admission
from plait.gateway.admission.metrics import AdmissionCollector
from plait.gateway.admission.rate_leases import RateLeases
from plait.gateway.admission.tenants import TenantIds, TenantTerms
from plait.gateway.api.auth import AdminAccess, KeyRing
from plait.gateway.api.call_api import CompletionApi, StepBefore
from plait.gateway.api.error_answers import SlowClientMetrics
from plait.gateway.api.operations import About, Operations
from plait.gateway.api.own_route import OwnRoute
from plait.gateway.api.refusals import Refusals
from plait.gateway.calls.call_reader import CallReader, PromptReader
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallLog, CallRecords, Reader
from plait.gateway.calls.relay import Accompany, Relay, ToldBy
from plait.gateway.calls.routes import ROUTES, CallRoute, CallRoutes
from plait.gateway.calls.tokenizer_metrics import TokenizerCollector
from plait.gateway.config.sections import Config
from plait.gateway.config.server import ServerConfig
from plait.gateway.fleet.guarded_policy import guarded
from plait.gateway.fleet.metrics import FleetCollector, HealthMetrics
from plait.gateway.fleet.router import Router
from plait.gateway.fleet.served_models import ModelNames
from plait.gateway.fleet.tokenizer_agreement import TokenizerAgreements
from plait.gateway.intake.open_bodies import OpenBodies
from plait.gateway.log.events import LogCollector
from plait.gateway.membership.engine_link import EngineLink
from plait.gateway.membership.engine_set import EngineSet
from plait.gateway.membership.hub_downloads import HubDownloads
from plait.gateway.membership.monitor import Monitor
from plait.gateway.membership.recovery import Recovery
from plait.gateway.membership.tokenizer_search import TokenizerSearch
from plait.gateway.metrics import new_registry
from plait.gateway.others import ADMIN_KEY, METRICS_KEY, Others
from plait.gateway.reloading import Reloading
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import at_loop_time, loop_time_s
from plait.policy.placement.policies import POLICIES


class Kernel:
    """The kernel of one gateway: worker number `index` of so many `workers`, which divide limits and memory.

    Raises ValueError for tokenizers, profiles or certificates that cannot be loaded.
    """

    def __init__(self, config: Config, tenants: TenantIds, *, workers: int = 1, index: int = 0) -> None:
        self.config = config
        self.tenants = tenants
        self.router = build_router(config)
        self.keys = KeyRing(config.server.api_keys, config.tenants, tenants)
        self.admin = AdminAccess(
            KeyRing(filter(None, [config.server.admin_key]), name=ADMIN_KEY), config.server.admin_port
        )
        self.terms = TenantTerms(config.admission, tenants, config.tenants, gateways=workers, index=index)
        self.links: dict[str, EngineLink] = {}
        prompts = PromptReader(config, self.router.block_tokens, self.router.models.base)
        self.tokenizers = prompts.tokenizers
        self.reader = CallReader.of(self.router, prompts, config.server)
        self.registry = new_registry()
        for collector in (LogCollector(), FleetCollector(self.router), TokenizerCollector(self.tokenizers)):
            self.registry.register(collector)
        self.supervisor = Supervisor(self.registry)
        self.downloads = HubDownloads(self.tokenizers, self.supervisor)
        self.recovery = self._new_recovery()
        self.monitor = self._new_monitor()
        self.engines = EngineSet(
            config, self.router, self.links, self.monitor, self.recovery, supervisor=self.supervisor
        )
        self.reloading = Reloading(config, self.engines, self.keys, self.admin.keys, self.terms, registry=self.registry)
        self.metrics = CallMetrics(self.registry, tenants.label)
        self.records = CallRecords((self.metrics, CallLog(tenants.label)))
        self.admission = self._new_admission(workers)
        self.gate = Gate(self.admission, config.admission.hold_s)
        self.relay = self._new_relay()
        self.bodies = new_bodies(config.server, workers)
        self.calls = CallRoutes(ROUTES)
        self.refusals = Refusals(
            self.records, self.metrics, self.gate, self.router.models, self.keys,
            calls=self.calls, root_path=config.server.root_path,
        )  # fmt: skip
        self.completions = CompletionApi(self.reader, self.relay)
        self.on_slow_client = SlowClientMetrics(self.registry).dropped
        self.is_leaving = False

    def is_stopping(self) -> bool:
        """Whether load balancers should send no more calls."""
        return self.is_leaving

    def admit(
        self,
        calls: Iterable[CallRoute],
        before: Iterable[StepBefore],
        readers: Iterable[Reader],
        told_receipt: ToldBy | None,
        accompany: Accompany | None,
    ) -> None:
        """Let a guest into the road of calls: its routes, its steps, what goes with calls, and who reads their ends."""
        self.calls.update({route.path: route for route in calls})
        self.completions.before.extend(before)
        self.relay.holdings.read_by(*readers)
        self.relay.told_receipt = told_receipt or self.relay.told_receipt
        self.relay.accompany += [] if accompany is None else [accompany]

    def divide(
        self,
        parts: Callable[[], Mapping[str, int] | None],
        part_of_caches: Callable[[str], float],
        leases: RateLeases,
    ) -> None:
        """Divide limits and rates with other gateways from now on, by a store.

        `parts` are those of tenants' running and waiting calls (`TenantTerms`), `part_of_caches` that of the engines'
        caches for a model.
        """
        self.terms.parts, self.admission.sessions.part, self.gate.leases = parts, part_of_caches, leases

    def routes(self, others: Others) -> list[OwnRoute]:
        """Those that are no calls'."""
        metrics_keys = KeyRing(filter(None, [self.config.server.metrics_key]), name=METRICS_KEY)
        operations = Operations(
            self.router, self.config.models, self.keys, self.registry, metrics_keys=metrics_keys,
            awaited=self.tokenizers.awaited, is_stopping=self.is_stopping, others=others,
        )  # fmt: skip
        return [*operations.routes, *About(self.router, self.keys, self.admin, self.calls).routes]

    def open(self) -> None:
        """Begin to watch engines."""
        self.tokenizers.open()
        self.monitor.open()
        self.downloads.open()
        self.recovery.open()
        self.supervisor.start("silent-streams", self.relay.silent_streams.watch)

    async def close(self) -> None:
        """Stop all that runs in the background, and close the connections to engines."""
        self.recovery.close()
        await self.supervisor.close()
        self.tokenizers.close()
        await self.engines.aclose()

    def _new_recovery(self) -> Recovery:
        return Recovery(
            self.router,
            self.links,
            self.supervisor,
            HealthMetrics(self.registry),
            trial_timeout_s=self.config.upstream.probe_timeout_s,
            hang_timeout_s=self.config.upstream.hang_timeout_s,
        )

    def _new_monitor(self) -> Monitor:
        contexts = {model.name: model.max_context_tokens for model in self.config.models if model.max_context_tokens}
        return Monitor(
            self.router,
            self.config.engines,
            self.config.upstream,
            contexts,
            agreements=TokenizerAgreements(self.tokenizers.fingerprint, self.tokenizers.requested),
            search=TokenizerSearch.of(self.config, self.tokenizers, self.downloads),
            supervisor=self.supervisor,
            on_change=self.recovery.on_change,
        )

    def _new_admission(self, workers: int) -> Admission:
        config = self.config.admission
        admission = Admission(
            self.router,
            at_loop_time,
            self.terms.limits,
            max_wait_s=config.max_wait_s,
            weights=self.terms.weights,
            ahead_s=config.ahead_s,
            chat_tokens=config.chat_tokens if config.sessions and self.router.policy.keeps_sessions else inf,
            part=lambda _model: 1 / workers,
        )
        self.registry.register(AdmissionCollector(admission, self.tenants.label))
        self.terms.on_change = lambda: admission.limits_changed(loop_time_s())
        return admission

    def _new_relay(self) -> Relay:
        return Relay(
            self.router,
            self.links,
            self.recovery,
            self.gate,
            self.metrics,
            records=self.records,
            objectives=ChangedObjectives(self.router, self.admission, self.links, self.supervisor, self.registry),
            max_attempts=self.config.upstream.max_attempts,
            open_answers=OpenAnswers(self.config.upstream.max_open_answer_bytes),
            forward_client_key=self.keys.is_open,
        )


def new_bodies(server: ServerConfig, workers: int) -> OpenBodies:
    """The limits on bodies. Workers on one machine divide its memory, but one body without files always fits."""
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
