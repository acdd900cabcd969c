"""Two real engines and a gateway in front of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.ports import free_port
from e2e.real_engines.engine import KV_TOKENS, MODEL, RealEngine, started, stored_blocks
from e2e.server_process import Server, eventually
from e2e.servers import PATIENCE, toml
from plait.policy.prefix.block_hash import TREE_BLOCK_TOKENS

FILLER_TOKENS: Final = KV_TOKENS // 8 - 2

_fillers = itertools.count(100)
"""First tokens of prompts: each makes a new one."""


@dataclass(frozen=True)
class EngineFleet:
    """A gateway and its engines by name."""

    gateway: Server
    engines: Mapping[str, RealEngine]

    def start(self, stack: ExitStack) -> None:
        """Start the engines together, then the gateway, and wait until calls can be sent; `stack` stops them."""
        stack.enter_context(started(self.engines.values()))
        self.start_gateway(stack)

    def start_gateway(self, stack: ExitStack) -> None:
        """Start the gateway over engines that run already and wait until it has them all; `stack` stops it."""
        self.gateway.start()
        stack.callback(self.gateway.stop)
        self.gateway.wait_until_ready()
        eventually(lambda: self.gateway.metric("plait_engine_up") == len(self.engines))

    def settle(self) -> None:
        """Return once the engines rest and the gateway knows what their caches hold."""
        states = {name: engine.settled_state() for name, engine in self.engines.items()}

        def knows(name: str) -> bool:
            held_tokens = len(stored_blocks(states[name])) * TREE_BLOCK_TOKENS
            return self.gateway.metric("plait_engine_resident_tokens", engine=name) == held_tokens

        eventually(lambda: all(knows(name) for name in states))

    def evict_all(self) -> None:
        """Make the engines evict whatever they have, by prompts that were never sent before and will not be again."""
        for engine in self.engines.values():
            for _ in range(-(-KV_TOKENS // FILLER_TOKENS)):
                prompt = [next(_fillers), *(token % 7000 for token in range(FILLER_TOKENS - 1))]
                response = engine.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
                assert response.status_code == 200, response.text

    def fill_with_single_blocks(self, engine: RealEngine) -> None:
        """Make an engine evict whatever it has, and fill it with prompts of one block each, its own or the tree's.

        SGLang evicts whole prompts. It evicts little at a time if they are short.
        """
        block_tokens = max(TREE_BLOCK_TOKENS, engine.cache_state().block_tokens)
        for _ in range(0, KV_TOKENS, FILLER_TOKENS):
            prompts = [
                [next(_fillers), *range(10, 10 + block_tokens)] for _ in range(FILLER_TOKENS // block_tokens + 1)
            ]
            response = engine.post("/v1/completions", json={"model": MODEL, "prompt": prompts, "max_tokens": 1})
            assert response.status_code == 200, response.text

    def computed_prompt_tokens(self) -> float:
        """Prompt tokens that the engines had to compute so far, by their own count."""
        return sum(engine.computed_prompt_tokens() for engine in self.engines.values())

    def cached_prompt_tokens(self) -> float:
        """Prompt tokens that the engines found in their caches so far, by their own count."""
        return sum(engine.cached_prompt_tokens() for engine in self.engines.values())


def new_gateway(
    name: str,
    engines: Mapping[str, RealEngine],
    model: Path,
    folder: Path,
    policy: str = "plait",
    *,
    chat_template: Path | None = None,
    tenants: Sequence[Mapping[str, Any]] = (),
    admission: Mapping[str, Any] | None = None,
    store: Mapping[str, Any] | None = None,
    tracing: Mapping[str, Any] | None = None,
    probe_interval_s: float = 0.05,
    engine_fields: Mapping[str, Any] | None = None,
    patience: Mapping[str, Any] = PATIENCE,
) -> Server:
    """A gateway over these engines that places by `policy`; not started yet."""
    port = free_port()
    config: dict[str, Any] = {
        "server": {"port": port, "drain_delay_s": 0},  # no load balancer has to notice its end
        "upstream": {**patience, "probe_interval_s": probe_interval_s},
        "placement": {"policy": policy},
        "admission": dict(admission or {}),
        "models": [
            {
                "name": MODEL,
                "tokenizer": str(model),
                **({} if chat_template is None else {"chat_template": str(chat_template)}),
            }
        ],
        "engines": [{"name": one.name, "url": one.url, **(engine_fields or {})} for one in engines.values()],
        **({"tenants": list(tenants)} if tenants else {}),
        **({} if tracing is None else {"tracing": tracing}),
        **({"store": dict(store)} if store else {}),
    }
    path = folder / f"{name}.toml"
    path.write_text(toml(config))
    return Server(name, port, ["serve", "--config", str(path)], folder / f"{name}.log", ready_path="/ready")
