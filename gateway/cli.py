"""The `plait` command: `serve` the gateway, run an `engine` that emulates one, `demo` both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from backends.embedded.completion import ServedModel
from backends.embedded.engine import EngineSettings
from backends.embedded.server import EmbeddedServer, ServerSettings
from backends.profiles import load_profile, shipped_profiles
from backends.tokenizer import load_tokenizer
from gateway.app import Gateway
from gateway.config import load_config
from gateway.log import configure_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. A mistake of the user's is one line on stderr and status 2."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except ValueError as error:
        print(f"plait: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _serve(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    configure_logging(config.log.level, config.log.format)
    server = config.server
    _run(Gateway(config), arguments.host or server.host, arguments.port or server.port, grace_s=server.shutdown_grace_s)
    return 0


def _engine(arguments: argparse.Namespace) -> int:
    configure_logging(arguments.log_level, "auto")
    profile = load_profile(arguments.profile)
    kv_tokens = arguments.kv_tokens or profile.kv.tokens
    settings = ServerSettings(
        engine=EngineSettings(
            name=arguments.name or f"{arguments.host}:{arguments.port}",
            model=arguments.model,
            kv_tokens=kv_tokens,
            block_tokens=arguments.block_tokens,
            max_batch_tokens=arguments.max_batch_tokens,
            max_running_calls=arguments.max_running_calls,
        ),
        cost_model=profile.cost_model(),
        model=ServedModel(
            arguments.model,
            load_tokenizer(arguments.tokenizer),
            min(arguments.max_context_tokens or kv_tokens, kv_tokens),
        ),
        time_scale=arguments.time_scale,
        api_key=arguments.api_key,
    )
    _run(EmbeddedServer(settings).app, arguments.host, arguments.port, grace_s=1.0)
    return 0


def _run(app: ASGIApp, host: str, port: int, *, grace_s: float) -> None:
    uvicorn.run(
        app,
        host=host,
        port=port,
        http="httptools",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plait", description=__doc__)
    parser.add_argument("--version", action="version", version=f"plait {version('plait')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the gateway")
    serve.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="configuration (see config.example.toml)"
    )
    serve.add_argument("--host", help="listen here instead of server.host")
    serve.add_argument("--port", type=int, help="listen here instead of server.port")
    serve.set_defaults(run=_serve)

    engine = commands.add_parser("engine", help="run an embedded engine: an OpenAI server over an emulated GPU")
    engine.add_argument("--host", default="127.0.0.1")
    engine.add_argument("--port", type=int, default=8101)
    engine.add_argument("--name", help="as it calls itself in reports (default: host:port)")
    engine.add_argument("--model", default="demo", help="the model it pretends to serve (default: %(default)s)")
    engine.add_argument("--tokenizer", default="embedded", help="as in the configuration (default: %(default)s)")
    engine.add_argument(
        "--profile", default="a6000-mistral-7b", help=f"cost profile: {', '.join(shipped_profiles())}, or a .toml"
    )
    engine.add_argument("--kv-tokens", type=int, help="KV cache in tokens (default: the profile's)")
    engine.add_argument("--block-tokens", type=int, default=16, help="tokens in a KV block (default: %(default)s)")
    engine.add_argument("--max-batch-tokens", type=int, default=2048, help="token budget of an iteration")
    engine.add_argument("--max-running-calls", type=int, default=256)
    engine.add_argument("--max-context-tokens", type=int, help="prompt and output together (default: the KV cache)")
    engine.add_argument("--time-scale", type=float, default=1.0, help="emulated seconds in a real one")
    engine.add_argument("--api-key", help="ask for this bearer token")
    engine.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    engine.set_defaults(run=_engine)
    return parser
