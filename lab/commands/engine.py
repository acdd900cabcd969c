"""`plait engine`: runs an embedded engine, an OpenAI server over an emulated GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace

from plait.backends.profiles import Profile, load_profile, shipped_profiles
from plait.backends.tokenization.loading import load_tokenizer
from plait.gateway.commands import port, positive, positive_number
from plait.gateway.log.events import configure_logging, write_stderr_in_background
from plait.lab.embedded.completion import ServedModel
from plait.lab.embedded.engine import EngineSettings
from plait.lab.embedded.lower_tiers import TierSettings
from plait.lab.embedded.server import EmbeddedServer, ServerSettings, run_server
from plait.policy.costs.tier_link import TierLink, link_of
from plait.policy.scheduling.local_scheduler import SCHEDULERS

TIERS = {"host": "host memory", "disk": "files"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    profiles = ", ".join(shipped_profiles())
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=port, default=8101, help="default: %(default)s")
    parser.add_argument("--name", help="its name in reports (default: host:port)")
    parser.add_argument("--model", default="demo", help="the model it pretends to serve (default: %(default)s)")
    parser.add_argument("--tokenizer", default="embedded", help="as in the configuration (default: %(default)s)")
    parser.add_argument("--profile", default="a6000-mistral-7b", help=f"cost profile: {profiles}, or a path to a .toml")
    parser.add_argument("--kv-tokens", type=positive, help="KV cache in tokens (default: the profile's)")
    for tier, what in TIERS.items():
        parser.add_argument(
            f"--{tier}-kv-tokens", type=positive, help=f"KV of so many tokens in {what} (default: none)"
        )
        parser.add_argument(f"--{tier}-gbps", type=positive_number, help="GB/s from there (default: the profile's)")
    parser.add_argument("--block-tokens", type=positive, default=16, help="tokens in a KV block (default: %(default)s)")
    parser.add_argument(
        "--window", type=positive, default=0, help="some layers see so many tokens (default: all see all)"
    )
    parser.add_argument(
        "--max-batch-tokens", type=positive, default=2048, help="an iteration's budget (default: %(default)s)"
    )
    parser.add_argument("--max-running-calls", type=positive, default=256, help="sequence slots (default: %(default)s)")
    parser.add_argument(
        "--scheduler", default="slo", choices=sorted(SCHEDULERS), help="the local scheduler (default: %(default)s)"
    )
    parser.add_argument("--max-context-tokens", type=positive, help="prompt and output (default: the KV cache)")
    parser.add_argument("--time-scale", type=positive_number, default=1.0, help="emulated seconds per real second")
    parser.add_argument("--ranks", type=positive, default=1, help="data-parallel ranks, each with a KV cache")
    parser.add_argument("--lockstep", action="store_true", help="ranks step together, as with experts over ranks")
    parser.add_argument("--api-key", help="require this bearer token")
    parser.add_argument("--stock", action="store_true", help="answer as an engine without Plait's adapter")
    parser.add_argument("--chat-only", action="store_true", help="have no routes of Responses and Messages")
    parser.add_argument("--random", action="store_true", help="give another text each time to requests without a seed")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])


def run(arguments: argparse.Namespace) -> None:
    """Serve until stopped. Raises ValueError for a profile or tokenizer that cannot be loaded."""
    write_stderr_in_background()
    configure_logging(arguments.log_level, "auto")
    profile = load_profile(arguments.profile)
    kv_tokens = arguments.kv_tokens or profile.kv.tokens
    if arguments.lockstep and arguments.ranks == 1:
        raise ValueError("--lockstep says nothing without --ranks")
    if kv_tokens < arguments.block_tokens:
        raise ValueError(f"--kv-tokens {kv_tokens}: expected at least one block of {arguments.block_tokens} tokens")
    context_tokens = min(arguments.max_context_tokens or kv_tokens, kv_tokens)
    engine = EngineSettings(
        name=arguments.name or f"{arguments.host}:{arguments.port}",
        model=arguments.model,
        kv_tokens=kv_tokens,
        block_tokens=arguments.block_tokens,
        max_batch_tokens=arguments.max_batch_tokens,
        max_running_calls=arguments.max_running_calls,
        scheduler=arguments.scheduler,
        lower=_lower(arguments, profile),
        window_tokens=arguments.window,
    )
    settings = ServerSettings(
        engine=engine if profile.ahead is None else replace(engine, ahead=profile.ahead),
        cost_model=profile.cost_model(),
        model=ServedModel(arguments.model, load_tokenizer(arguments.tokenizer), context_tokens, arguments.random),
        time_scale=arguments.time_scale,
        api_key=arguments.api_key,
        stock=arguments.stock,
        chat_only=arguments.chat_only,
        ranks=arguments.ranks,
        lockstep=arguments.lockstep,
    )
    run_server(EmbeddedServer(settings).app, arguments.host, arguments.port)


def _lower(arguments: argparse.Namespace, profile: Profile) -> tuple[TierSettings, ...]:
    """The tiers below the KV cache. Raises ValueError for a bandwidth without a size.

    `--host-gbps` and `--disk-gbps` are in 10^9 bytes a second.
    """
    tiers = []
    for tier in TIERS:
        kv_tokens, gbps = getattr(arguments, f"{tier}_kv_tokens"), getattr(arguments, f"{tier}_gbps")
        if gbps and not kv_tokens:
            raise ValueError(f"--{tier}-gbps says nothing without --{tier}-kv-tokens")
        if kv_tokens:
            link = link_of(tier, profile.cost_model().links)
            if gbps:
                link = TierLink.of(tier, profile.kv.bytes_per_token, gbps, link.latency_s)
            tiers.append(TierSettings(link, kv_tokens))
    return tuple(tiers)
