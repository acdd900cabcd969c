"""What an engine of these tests can do: a real scheduler, run step by step, with a made-up model.

`on_vllm.engine` and `on_sglang.engine` build them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from plait.backends.protocol.cache_state import CacheState
from plait.policy.scheduling.plan import LocalScheduler

MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
"""The configuration of the model that the engines take themselves to serve."""
PAGE_TOKENS: Final = 16
"""Of an engine whose `Setup` says nothing else. vLLM calls a page a block."""
KV_TOKENS: Final = 3200
"""Of such an engine, vLLM's one page for padding included."""
MAX_RUNNING_CALLS: Final = 16
"""Of such an engine."""


class Clock:
    """Stands still until it is set."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class BuiltEngine(Protocol):
    """Adds calls, runs steps, and answers each with the tokens of `answer`."""

    before_result: Callable[[], None]
    """Is called when the tokens of a step are about to come."""

    @property
    def driver(self) -> Any:
        """The plugin's driver. AttributeError on a stock engine."""
        ...

    @property
    def policy(self) -> LocalScheduler:
        """What makes the plugin's plans. AttributeError on a stock engine."""
        ...

    @property
    def batch_tokens(self) -> int:
        """The most tokens of a step, as the engine has it now."""
        ...

    @property
    def tokens(self) -> Mapping[str, list[int]]:
        """The output so far of every call that was ever added, by name."""
        ...

    @property
    def prompts(self) -> Mapping[str, int]:
        """The prompt tokens of every call that was ever added, by name."""
        ...

    @property
    def waiting(self) -> list[str]:
        """The names of the calls in the engine's queue, first to last."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        ...

    def follow_clock(self, clock: Clock) -> None:
        """Take the plugin's time from `clock`."""
        ...

    def add(
        self,
        prompt: Sequence[int],
        output_tokens: int = 4,
        *,
        name: str | None = None,
        salt: str | None = None,
        **annotations: Any,
    ) -> str:
        """Send a call, and return its name."""
        ...

    def abort(self, name: str) -> None:
        """Abort a call. It may have ended."""
        ...

    def step(self) -> dict[str, int]:
        """Run one step. Returns the tokens computed for each call, in the engine's order."""
        ...

    def run(self, limit: int = 3000) -> list[dict[str, int]]:
        """Step until nothing is left to do, for at most `limit` steps."""
        ...

    def report(self, since: int | None, epoch: str | None, gateway: str | None = None) -> CacheState:
        """The plugin's cache-state report, for a gateway."""
        ...

    def held(self) -> dict[int, int | None]:
        """What the engine's own cache finds of all that it was ever sent: tree block -> its parent."""
        ...

    def held_below(self) -> dict[str, dict[int, int | None]]:
        """The same of each tier below the accelerator, without what is in a faster one."""
        ...

    def pages(self) -> tuple[int, int, int]:
        """All pages of the engine's KV cache, the free ones, and the cached ones that can be evicted."""
        ...

    def empty_cache(self) -> bool:
        """Have the engine forget all that it has cached. Returns whether it did."""
        ...


class Build(Protocol):
    """Builds an engine, the only one that is used from now on.

    `policy` makes its plans. `plait` are the plugin's settings, None for a stock engine. `changes` are fields of the
    engine's own `Setup`.
    """

    def __call__(
        self, policy: LocalScheduler | None = None, *, plait: Mapping[str, Any] | None = ..., **changes: Any
    ) -> BuiltEngine: ...


def token_after(sequence_tokens: int) -> int:
    """What the made-up model says after so many tokens: never the end of a sequence."""
    return 3 + 7 * sequence_tokens % 1000


def answer(prompt_tokens: int, output_tokens: int) -> list[int]:
    """What the made-up model answers."""
    return [token_after(prompt_tokens + position) for position in range(output_tokens)]
