"""What a gateway with its defaults predicts of engines that report nothing, once their answers have taught it.

Llama's layers are cached alike. Gemma 3 has windows, whose blocks take more of the cache and are dropped sooner: an
engine finds a prefix only while all its layers have it. Each engine answers calls on shared prefixes, whose ends are
new. The first calls teach, the next are measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import pytest

from e2e.real_engines.engine import EngineKind, RealEngine, started
from e2e.real_engines.findings import Findings
from e2e.real_engines.fleet import EngineFleet, new_gateway
from e2e.real_engines.token_calls import Placed, cached_share, far_share, near_share, placed, predicted_share
from e2e.server_process import Server
from e2e.servers import DEFAULTS, PATIENT
from e2e.tiny_model import VOCABULARY, tiny_gemma, tiny_model

PREFIX_TOKENS: Final = (1_560, 1_640)
"""From and to: ends that are in no engine's block."""
OWN_TOKENS: Final = (30, 60)
OUTPUT_TOKENS: Final = 8
AT_ONCE: Final = 2
TAUGHT: Final = 100
MEASURED: Final = 150
UNCACHED_TAUGHT: Final = 20
"""The first calls of an engine without a cache, which teach that."""
NEAR_BEFORE: Final = {6: 0.98, 14: 0.85}
"""The least share of calls predicted to a tree block, by prefixes that fit an engine with Llama, and that do not."""
PLACED_AT_ONCE: Final = 4
PLACED_SHARE: Final = {6: 0.55, 8: 0.28}
"""The least cached share on two engines, by prefixes: .65 and .34 before anything was learned."""


class Setup(NamedTuple):
    """A stock engine, and what it has other than the suite's."""

    name: str
    gemma: bool = False
    blocks: int | None = None
    details: bool = True
    """Whether its answers say how many prompt tokens were cached."""
    caching: bool = True


GEMMA: Final = Setup("gemma", gemma=True)
LARGE_GEMMA: Final = Setup("large-gemma", gemma=True, blocks=4_096)
SILENT_GEMMA: Final = Setup("silent-gemma", gemma=True, details=False)
LLAMA: Final = Setup("llama")
SILENT_LLAMA: Final = Setup("silent-llama", details=False)
UNCACHED_LLAMA: Final = Setup("uncached-llama", caching=False)
SILENT_UNCACHED_LLAMA: Final = Setup("silent-uncached-llama", caching=False, details=False)


def built(setup: Setup, kind: EngineKind, python: Path, folder: Path) -> RealEngine:
    """A stock engine; a test of Gemma is skipped where SGLang's stand-ins for a CPU serve no windows."""
    if kind.name != "vllm" and setup.gemma:
        pytest.skip("serves no model with windows on a CPU")
    engine = kind.stock(setup.name, python, tiny_gemma() if setup.gemma else tiny_model(), folder)
    if setup.blocks is not None:
        engine.add_flags(("--num-gpu-blocks-override", str(setup.blocks)))
    if not setup.details:
        engine.command.remove(kind.tells_cached)
    if not setup.caching:
        engine.add_flags((kind.uncached,))
    return engine


def named(setup: Setup) -> str:
    return setup.name


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, kind: EngineKind, python: Path, folder: Path) -> Iterator[RealEngine]:
    """The engine of a setup."""
    engine = built(request.param, kind, python, folder)
    with started((engine,)):
        yield engine


@contextmanager
def gateway_before(engines: Sequence[RealEngine], folder: Path, policy: str = "plait") -> Iterator[Server]:
    """A gateway with its defaults, which knows nothing of the engines yet."""
    by_name = {engine.name: engine for engine in engines}
    gateway = new_gateway(
        f"estimating-{policy}",
        by_name,
        tiny_model(),
        folder,
        policy,
        probe_interval_s=DEFAULTS["probe_interval_s"],
        patience=PATIENT,
    )
    with ExitStack() as stack:
        EngineFleet(gateway, by_name).start_gateway(stack)
        yield gateway


def prompts(prefixes: int, calls: int) -> list[list[int]]:
    """Prompts on prefixes that are drawn evenly; for as many prefixes the same prompts each time."""
    drawn = random.Random(prefixes)

    def tokens(least: int, most: int) -> list[int]:
        return [drawn.randrange(10, VOCABULARY) for _ in range(drawn.randint(least, most))]

    shared = [tokens(*PREFIX_TOKENS) for _ in range(prefixes)]
    return [[*drawn.choice(shared), *tokens(*OWN_TOKENS)] for _ in range(calls)]


def noted(findings: Findings, subject: str, calls: Sequence[Placed]) -> None:
    findings.figures[subject] = {
        "calls": len(calls),
        "found cached": cached_share(calls),
        "predicted": predicted_share(calls),
        "within a tree block": near_share(calls),
        "off by more than half": far_share(calls),
        "mean E2E (s)": fmean(one.e2e_s for one in calls),
    }


@pytest.fixture
def learned(engine: RealEngine, prefixes: int, folder: Path, findings: Findings) -> list[Placed]:
    """The measured calls."""
    sent = prompts(prefixes, TAUGHT + MEASURED)
    with gateway_before((engine,), folder) as gateway:
        placed(gateway, sent[:TAUGHT], AT_ONCE, OUTPUT_TOKENS)
        calls = placed(gateway, sent[TAUGHT:], AT_ONCE, OUTPUT_TOKENS)
    noted(findings, f"{engine.name}, {prefixes} prefixes", calls)
    return calls


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [GEMMA], ids=named, indirect=True)
@pytest.mark.parametrize("prefixes", [4, 8, 12])
def test_an_engine_that_keeps_less_than_its_blocks_suggest(learned: list[Placed], findings: Findings) -> None:
    error = abs(predicted_share(learned) - cached_share(learned))
    far = findings.at_most("Gemma, small cache: predictions off by more than half", far_share(learned), 0.1)
    assert findings.at_most("Gemma, small cache: error of the cached share", error, 0.05)
    assert far


@pytest.mark.parametrize("engine", [LARGE_GEMMA], ids=named, indirect=True)
@pytest.mark.parametrize("prefixes", [8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 16))])
def test_an_engine_that_finds_a_prefix_from_its_third_call_on(learned: list[Placed], findings: Findings) -> None:
    """The second call shows the engine where prompts part, and from then on windows are kept there."""
    assert findings.at_least("Gemma, large cache: share predicted", near_share(learned), 0.85)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "prefixes"), [(SILENT_GEMMA, 8), (SILENT_LLAMA, 14)], ids=["gemma", "llama"], indirect=["engine"]
)
def test_an_engine_whose_answers_do_not_tell(
    engine: RealEngine, prefixes: int, folder: Path, findings: Findings
) -> None:
    """The default of both kinds. Only their metrics have sums of what was found."""
    sent = prompts(prefixes, TAUGHT + MEASURED)
    with gateway_before((engine,), folder) as gateway:
        taught = placed(gateway, sent[:TAUGHT], AT_ONCE, OUTPUT_TOKENS)
        before = engine.cached_prompt_tokens()
        calls = placed(gateway, sent[TAUGHT:], AT_ONCE, OUTPUT_TOKENS)
        found = (engine.cached_prompt_tokens() - before) / sum(one.prompt for one in calls)
    assert cached_share([*taught, *calls]) == 0, "else the answers do tell"
    findings.figures[f"sums only, {engine.name}"] = {"found cached": found, "predicted": predicted_share(calls)}
    assert findings.at_most(
        f"sums only, {engine.name}: error of the cached share", abs(predicted_share(calls) - found), 0.05
    )


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [UNCACHED_LLAMA, SILENT_UNCACHED_LLAMA], ids=named, indirect=True)
def test_an_engine_without_prefix_caching(engine: RealEngine, folder: Path) -> None:
    with gateway_before((engine,), folder) as gateway:
        calls = placed(gateway, prompts(6, TAUGHT), AT_ONCE, OUTPUT_TOKENS)
    assert {one.cached for one in calls} == {0}
    assert {one.predicted for one in calls[UNCACHED_TAUGHT:]} == {0}


@pytest.mark.nightly
@pytest.mark.parametrize("engine", [LLAMA], ids=named, indirect=True)
@pytest.mark.parametrize("prefixes", NEAR_BEFORE)
def test_an_engine_that_keeps_what_was_believed(
    learned: list[Placed], prefixes: int, kind: EngineKind, findings: Findings
) -> None:
    """Learning costs nothing where there was nothing to learn."""
    near = near_share(learned)
    assert findings.at_least(f"Llama, {prefixes} prefixes: share predicted", near, NEAR_BEFORE[prefixes])


@pytest.fixture(scope="module")
def pair(kind: EngineKind, python: Path, folder: Path) -> Iterator[list[RealEngine]]:
    """Two engines of one setup."""
    engines = [built(GEMMA._replace(name=f"gemma-{number}"), kind, python, folder) for number in (1, 2)]
    with started(engines):
        yield engines


@pytest.mark.nightly
@pytest.mark.parametrize("prefixes", PLACED_SHARE)
def test_placement_by_what_was_learned(pair: list[RealEngine], prefixes: int, folder: Path, findings: Findings) -> None:
    """To predict nothing would be right of most calls, and would find as little as least outstanding does."""
    shares = dict[str, float]()
    for policy in ("least_outstanding", "plait"):
        with gateway_before(pair, folder, policy) as gateway:
            calls = placed(gateway, prompts(prefixes, TAUGHT + 2 * MEASURED), PLACED_AT_ONCE, OUTPUT_TOKENS)[TAUGHT:]
        noted(findings, f"two Gemmas, {prefixes} prefixes, {policy}", calls)
        shares[policy] = cached_share(calls)
    least = max(PLACED_SHARE[prefixes], 1.5 * shares["least_outstanding"])
    assert findings.at_least(f"two Gemmas, {prefixes} prefixes: cached share", shares["plait"], least)
