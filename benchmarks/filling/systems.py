"""The systems that are compared: a fleet of embedded engines in virtual time, and what stands before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Final

import msgspec

from benchmarks.filling.workloads import BLOCK_TOKENS
from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import CacheState
from plait.gateway.admission.room import AHEAD_S
from plait.gateway.config.sections import AdmissionConfig
from plait.gateway.fleet.router import Router
from plait.lab.embedded.engine import Engine, EngineSettings
from plait.lab.embedded.lower_tiers import TierSettings
from plait.lab.simulation.compare import MODEL
from plait.lab.simulation.simulate import Simulation
from plait.policy.costs.tier_link import TierLink, link_of
from plait.policy.placement.policies import Policy

NONE: Final = "none"
ROUND_ROBIN: Final = "round_robin"
ADMISSION: Final = "admission"
FCFS: Final = "fcfs"
FCFS_ADMISSION: Final = "fcfs, admission"
BASELINES: Final = (NONE, ROUND_ROBIN)
DEFAULT: Final = (*BASELINES, ADMISSION)
"""What a full fleet is run with if nothing else is asked for."""

NewSystem = Callable[[int], tuple[Router, Simulation]]
"""Makes a router and its simulation, for one run with this seed."""


REPORT_DELAY_S: Final = 0.02
"""Several gateways hear so late of each other's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Equal engines. Their KV cache is the profile's without `kv_tokens`. `scheduler` names their local scheduler.

    Below it they have a tier in host memory of so many times its size (`host`), with a link of `host_gbps`. A router
    may not know of it (`knows_host`): it gets reports without tiers, as older ones do.

    The `fast` first engines may be so many times `faster`; the router may not have been `told`.
    """

    engines: int = 4
    profile: str = "a6000-mistral-7b"
    kv_tokens: int | None = None
    scheduler: str = "slo"
    faster: float = 1.0
    fast: int = 1
    told: bool = True
    gateways: int = 1
    host: float = 0.0
    host_gbps: float = 25.0
    knows_host: bool = True


def systems(fleet: FleetSize) -> dict[str, NewSystem]:
    """The systems by name. Each begins with an empty fleet.

    A system whose name is `ADMISSION` is held to the claims. Those of `FCFS` are on engines that serve calls in the
    order of arrival, as one without the adapter does.
    """
    most_s, in_order = AdmissionConfig().max_wait_s, replace(fleet, scheduler="fcfs")
    return {
        NONE: partial(_seeded, fleet, "plait", inf, inf),
        ROUND_ROBIN: partial(_seeded, fleet, "round_robin", inf, inf),
        ADMISSION: partial(_seeded, fleet, "plait", AHEAD_S, most_s),
        FCFS: partial(_seeded, in_order, "plait", inf, inf),
        FCFS_ADMISSION: partial(_seeded, in_order, "plait", AHEAD_S, most_s),
    }


def _seeded(fleet: FleetSize, policy: str, ahead_s: float, max_wait_s: float, _seed: int) -> tuple[Router, Simulation]:
    return simulated(fleet, policy, ahead_s, max_wait_s)


def simulated(
    fleet: FleetSize, policy: str | Policy, ahead_s: float, max_wait_s: float, chat_tokens: float | None = None
) -> tuple[Router, Simulation]:
    """The last three as in `Simulation`. Infinite: each call is placed and sent as it arrives."""
    (router, *more), engines = _fleet(fleet, policy)
    return router, Simulation(
        router,
        engines,
        MODEL,
        more=more,
        report_delay_s=REPORT_DELAY_S if more else 0.0,
        ahead_s=ahead_s,
        max_wait_s=max_wait_s,
        chat_tokens=chat_tokens,
    )


def _fleet(fleet: FleetSize, policy: str | Policy) -> tuple[list[Router], dict[str, Engine]]:
    """A router for each gateway, and their engines by id."""
    profile = load_profile(fleet.profile)
    costs, kv_tokens = profile.cost_model(), fleet.kv_tokens or profile.kv.tokens
    routers = [Router(policy, gateway_id=f"gateway-{number}") for number in range(fleet.gateways)]
    lower: tuple[TierSettings, ...] = ()
    if fleet.host:
        link = TierLink.of("host", profile.kv.bytes_per_token, fleet.host_gbps, link_of("host", ()).latency_s)
        lower = (TierSettings(link, round(fleet.host * kv_tokens)),)
    engines = {}
    for number in range(fleet.engines):
        engine_id = f"engine-{number}"
        real = replace(costs, efficiency=costs.efficiency * fleet.faster) if number < fleet.fast else costs
        for router in routers:
            router.add_engine(engine_id, real if fleet.told else costs, kv_tokens=kv_tokens)
        settings = EngineSettings(
            name=engine_id,
            model=MODEL,
            kv_tokens=kv_tokens,
            block_tokens=BLOCK_TOKENS,
            scheduler=fleet.scheduler,
            lower=lower,
        )
        engines[engine_id] = (Engine if fleet.knows_host else Untold)(settings, real)
    return routers, engines


class Untold(Engine):
    """An engine whose reports say nothing of its lower tiers."""

    def cache_state(self, since: int | None = None, gateway: str | None = None) -> CacheState:
        """The report without them."""
        return msgspec.structs.replace(super().cache_state(since, gateway), tiers=[])
