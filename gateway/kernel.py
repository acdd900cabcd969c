"""The kernel: reads calls, admits, places, sends, relays and counts them, and watches engines. It knows no guest."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from math import inf

from plait.gateway.admission.admission import Admission
from plait.gateway.admission.metrics import AdmissionCollector
from plait.gateway.admission.tenants import TenantIds, TenantTerms
from plait.gateway.api.auth import KeyRing
from plait.gateway.api.call_api import CompletionApi, StepBefore
from plait.gateway.api.refusals import Refusals
from plait.gateway.asgi import Sink
from plait.gateway.calls.call_reader import CallReader, PromptReader
from plait.gateway.calls.changed_objectives import ChangedObjectives
from plait.gateway.calls.delivery import Delivery
from plait.gateway.calls.gate import Gate
from plait.gateway.calls.metrics import CallMetrics
from plait.gateway.calls.open_answers import OpenAnswers
from plait.gateway.calls.records import CallLog, CallRecords, Reader
from plait.gateway.calls.relay import Relay
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
from plait.gateway.supervision import Supervisor
from plait.gateway.timer import at_loop_time, loop_time_s
from plait.policy.placement.policies import POLICIES


class Kernel:
    """The kernel of one gateway, of `gateways` that divide limits; so many `workers` divide the machine's memory.

    `readers` read the ends of calls besides metrics and the log, and `told_receipt` is as in `Relay`. Raises ValueError
    for tokenizers, profiles or certificates that cannot be loaded.
    """

    def __init__(
        self,
        config: Config,
        tenants: TenantIds,
        *,
        readers: Sequence[Reader] = (),
        told_receipt: Callable[[Sink, Delivery], Sink] | None = None,
        gateways: int = 1,
        index: int = 0,
        workers: int = 1,
    ) -> None:
        self.config = config
        self.tenants = tenants
        self.router = build_router(config)
        self.keys = KeyRing(config.server.api_keys, config.tenants, tenants)
        self.terms = TenantTerms(config.admission, tenants, config.tenants, gateways=gateways, index=index)
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
        self.metrics = CallMetrics(self.registry, tenants.label)
        self.records = CallRecords((self.metrics, CallLog(tenants.label), *readers))
        self.admission = self._new_admission(gateways)
        self.gate = Gate(self.admission, config.admission.hold_s)
        self.relay = self._new_relay(told_receipt)
        self.bodies = new_bodies(config.server, workers)
        self.refusals = Refusals(
            self.records, self.metrics, self.gate, self.router.models, self.keys, root_path=config.server.root_path
        )

    def completions(self, before: Sequence[StepBefore] = ()) -> CompletionApi:
        """What serves chats and texts, after the steps of guests."""
        return CompletionApi(self.reader, self.relay, before)

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

    def _new_admission(self, gateways: int) -> Admission:
        config = self.config.admission
        admission = Admission(
            self.router,
            at_loop_time,
            self.terms.limits,
            max_wait_s=config.max_wait_s,
            weights=self.terms.weights,
            ahead_s=config.ahead_s,
            chat_tokens=config.chat_tokens if config.sessions and self.router.policy.keeps_sessions else inf,
            part=lambda _model: 1 / gateways,
        )
        self.registry.register(AdmissionCollector(admission, self.tenants.label))
        self.terms.on_change = lambda: admission.limits_changed(loop_time_s())
        return admission

    def _new_relay(self, told_receipt: Callable[[Sink, Delivery], Sink] | None) -> Relay:
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
            told_receipt=told_receipt,
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
