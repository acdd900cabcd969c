"""Has a forward pass take as long as an accelerator's, by one of Plait's cost profiles, and compute nothing.

Schedulers are compared so on a machine without an accelerator: steps take as long as their tokens, whatever else the
machine does. Everything else is SGLang's own. It is loaded if `PLAIT_EMULATED_DEVICE` names a profile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

VARIABLE = "PLAIT_EMULATED_DEVICE"
LIKELIEST = 1000
"""The id of a token that means nothing special."""
REPLACED = "sglang.srt.models.llama.LlamaForCausalLM.forward"


def register() -> None:
    """Register it with SGLang, which calls this in each of its processes."""
    profile = os.environ.get(VARIABLE)
    if profile:
        HookRegistry.register(REPLACED, forward_pass(profile), HookType.REPLACE)


def forward_pass(profile: str) -> Callable[..., object]:
    """A model's `forward` on an accelerator with this profile. The same token is always the likeliest."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput  # noqa: PLC0415 - loaded only if needed

    from plait.backends.profiles import load_profile  # noqa: PLC0415

    cost_model = load_profile(profile).cost_model()

    def forward(model: Any, input_ids: object, positions: object, batch: Any, **_: object) -> object:
        ends_s = time.perf_counter() + cost_model.iteration_time_s(_work(batch))
        logits = torch.zeros(batch.batch_size, model.config.vocab_size)
        logits[:, LIKELIEST] = 1
        time.sleep(max(0.0, ends_s - time.perf_counter()))
        return LogitsProcessorOutput(next_token_logits=logits)

    return forward


def _work(batch: Any) -> Iterable[tuple[int, int]]:
    """(New tokens, context tokens) of each sequence."""
    if batch.forward_mode.is_extend():
        return zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
    return [(1, length - 1) for length in batch.seq_lens_cpu.tolist()]
