"""In a large fleet few engines are compared. What is in a lower tier counts as cached."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.backends.profiles import load_profile
from plait.backends.protocol.cache_state import KvState, LowerTier, StoredRun
from plait.gateway.fleet.router import Router
from plait.policy.costs.delay import CallToPlace, offer
from plait.policy.costs.engine_view import EngineView
from plait.policy.placement.least_delay import FEW, candidates, least_delay, repay_copies
from plait.policy.prefix.prefix_tree import Segment
from tests.gateway.fleet.lettered_prompts import call, hashes, report

COSTS = load_profile("a6000-mistral-7b").cost_model()
ENGINES = 8


def fleet(dice: random.Random, prefix: str) -> Router:
    """Each engine has a part of the prefix on its accelerator, in host memory or nowhere. Links are busy or slow."""
    router = Router("plait")
    for number in range(ENGINES):
        name, part = f"e{number}", prefix[: dice.randrange(1, len(prefix))]
        router.add_engine(name, COSTS, kv_tokens=640_000)
        router.health.answered(name, {"m": None})
        where = dice.choice(("device", "host", "host", "nowhere"))
        stored = [StoredRun(None, hashes(part))] if where == "host" else []
        state = report(*([part] if where == "device" else []), snapshot=True)
        state = msgspec.structs.replace(
            state, kv=KvState(40_000, 20_000, 0), tiers=[LowerTier("host", 10_000, stored=stored)]
        )
        router.report(name, state, 0.0)
        (tier,) = router.engines[name].view.tiers.views
        tier.queue.load(0.0, dice.choice((0.0, 0.0, 0.05, 0.5, 5.0)))
        tier.token_s = dice.choice((None, None, 1e-5, 5.0))
    return router


@pytest.mark.no_cover
@given(st.integers(0, 10_000))
def test_the_best_of_the_candidates_is_chosen_and_one_has_the_most_in_any_tier(seed: int) -> None:
    dice = random.Random(seed)
    prefix = (string.ascii_letters * 2)[: dice.randrange(10, 60)]
    router = fleet(dice, prefix)
    for segment in router.tree.match(hashes(prefix))[-1:]:
        for _ in range(40):
            segment.node.use(1.0)
    asked = call(prefix + "!")
    path, views = router.tree.match(asked.block_hashes), [engine.view for engine in router.engines.values()]
    situation = router.demand.situation(asked, path, views, 1.0)
    placing = CallToPlace.of(asked, situation)
    few = candidates(placing, situation, views, FEW)
    assert max(cached(view, path) for view in few) == max(cached(view, path) for view in views)
    offers = [offer(placing, situation, view) for view in few]
    repay_copies(placing, situation, offers)
    best = min(offers, key=lambda one: one.rank)
    found = least_delay(asked, situation)
    assert found.engine_id == best.engine.engine_id
    assert found.cost is not None
    assert found.cost.total_s == pytest.approx(best.cost.total_s)


def cached(view: EngineView, path: Sequence[Segment]) -> int:
    """In any tier."""
    return view.tiers.lowest.cached_blocks(path)
