"""Transfers between a CPU's "accelerator" and host memory, made up: nothing is copied, and each ends after a while."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from plait.backends.adapter.required_names import load

HICACHE: Final = "PLAIT_TEST_HICACHE"
"""The environment variable with the write policy of the process's scheduler. Without it, there is no HiCache."""
TRANSFER_S: Final = 0.25
"""What each transfer takes."""
FLAGS: Final = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first"),
)
TRANSFERS: Final = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_MODULES: Final = (
    *("sglang.srt.managers.cache_controller", "sglang.srt.mem_cache.l2_transfer"),
    *("sglang.srt.mem_cache.pool_host.common", "sglang.srt.mem_cache.memory_pool_host"),
)
LOAD: Final = "load_to_device_per_layer"
_COPIES: Final = ("backup_from_device_all_layer", LOAD)


class Event:
    """Has happened, whenever it is asked."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        return TRANSFER_S * 1000


class EndOfTransfer(Event):
    """With this `patience`, it has not happened yet when it is asked. Then it may have happened by the next time."""

    patience: ClassVar[float] = 0.0
    dice: ClassVar[random.Random] = random.Random(0)

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._is_over = False

    def record(self, *_: Any) -> None:
        self._is_over = False

    def synchronize(self) -> None:
        self._is_over = True

    def query(self) -> bool:
        self._is_over = self._is_over or self.dice.random() >= self.patience
        return self._is_over


class Stream:
    def wait_stream(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...


def made_up() -> None:
    """From now on, SGLang gets such events and streams, and host memory that is not pinned."""
    for name in _MODULES:
        module = load(name)
        if hasattr(module, "device_module"):
            # The controller's own events are those of layers in a forward pass, which waits for them.
            event = Event if name.endswith("cache_controller") else EndOfTransfer
            streams = {"Stream": Stream, "stream": lambda _: nullcontext(), "current_stream": Stream}
            module.device_module = SimpleNamespace(Event=event, **streams, __name__="made up")
        if hasattr(module, "_cuda_host_register"):
            module._cuda_host_register = lambda *_, **__: None


COPIED: Final[Counter[str]] = Counter()
"""How often each of a host pool's methods that copy pages was called."""


def copy_nothing(pool: Any) -> None:
    """A host pool's methods that copy pages only count."""
    for one in (pool, *(entry.host_pool for entry in getattr(pool, "entries", ()))):
        for name in _COPIES:
            for variant in (name, f"{name}_physical"):
                if hasattr(one, variant):
                    setattr(one, variant, lambda *_, name=name, **__: COPIED.update([name]))
