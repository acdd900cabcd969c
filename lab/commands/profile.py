"""`plait profile`: measures a live engine and fits a cost profile."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from plait.gateway.commands import positive
from plait.lab.profiling.engine_probe import EngineIdentity, EngineProbe
from plait.lab.profiling.fitted_profile import Circumstances, FittedProfile, fit_profile
from plait.lab.profiling.profile_plan import FULL, QUICK
from plait.lab.profiling.profiler import Profiler
from plait.lab.profiling.tier_loads import LinkProfiler
from plait.policy.costs.tier_link import BYTES_PER_TOKEN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", required=True, metavar="URL", help="as http://host:port; it must have no other load"
    )
    parser.add_argument("--model", help="the model to profile (default: the engine's first)")
    parser.add_argument("--api-key", help="the engine's bearer token")
    parser.add_argument("--out", type=Path, metavar="FILE.toml", help="where the profile goes (default: stdout)")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"measure fewer points, in less than a minute (without it: {FULL.limit_s / 60:.0f}; tiers: twice that)",
    )
    parser.add_argument("--accelerator", help="the engine's hardware, to be named in the profile")
    parser.add_argument("--kv-tokens", type=positive, help="the engine's KV cache, if it has no /cache_state")
    parser.add_argument("--max-batch-tokens", type=positive, help="an iteration's budget, if it has no /cache_state")
    parser.add_argument(
        "--kv-bytes-per-token",
        type=positive,
        metavar="N",
        help=f"the KV of a token, by which the links of lower tiers are told in GB/s (default: {BYTES_PER_TOKEN})",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, fit, and write the profile. Progress and report go to stderr.

    Raises ValueError if scipy is missing or the engine cannot be profiled, OSError if `--out` cannot be written.
    """
    if find_spec("scipy") is None:
        raise ValueError("profiles are fitted by scipy: pip install 'plait[profile]'")
    out: Path | None = arguments.out
    if out is not None and (out.suffix != ".toml" or not out.parent.is_dir()):
        raise ValueError(f"--out has to be a .toml file in a folder that exists, not {out}")
    fitted = asyncio.run(_fit(arguments))
    print(fitted.report(), file=sys.stderr)
    text = fitted.profile.toml()
    if out is None:
        print(text, end="")
        return
    out.write_text(text, encoding="utf-8")
    print(f"written to {out}: plait engine --profile {out}", file=sys.stderr)


async def _fit(arguments: argparse.Namespace) -> FittedProfile:
    effort = QUICK if arguments.quick else FULL
    rng = random.Random()  # noqa: S311 - no fixed seed: the engine may have the prompts of the last run cached
    async with EngineProbe(arguments.engine, model=arguments.model, api_key=arguments.api_key) as probe:
        identity = _as_told(await probe.identify(), arguments)
        _progress(f"profiling {identity.model} on {identity.engine}")
        measured = await Profiler(probe, identity.limits, effort, rng, _progress).measure()
        loads = await LinkProfiler(probe, identity.limits, rng, _progress).measure(effort.limit_s)
    circumstances = Circumstances(
        date=datetime.now(UTC).date().isoformat(),
        version=version("plait"),
        accelerator=arguments.accelerator,
        told=tuple(name for name, value in _told(arguments).items() if value),
        kv_bytes_per_token=arguments.kv_bytes_per_token,
    )
    return fit_profile(measured, identity, circumstances, loads)


def _told(arguments: argparse.Namespace) -> dict[str, int | None]:
    return {
        "KV cache": arguments.kv_tokens,
        "Token budget": arguments.max_batch_tokens,
        "Bytes of a token": arguments.kv_bytes_per_token,
    }


def _as_told(identity: EngineIdentity, arguments: argparse.Namespace) -> EngineIdentity:
    """The engine's identity, in which limits from the command line replace those that the engine reports."""
    limits = replace(
        identity.limits,
        kv_tokens=arguments.kv_tokens or identity.limits.kv_tokens,
        budget_tokens=arguments.max_batch_tokens or identity.limits.budget_tokens,
    )
    return replace(identity, limits=limits)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
