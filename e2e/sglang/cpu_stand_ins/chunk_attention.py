"""Has PyTorch's attention compute a chunk of a prompt for the chunk's cost, as an accelerator's kernels do.

SGLang's own attention for the CPU computes each sequence from its first token on, also if all but one are cached: a
chunk, and a decode beside prompts, take the square of the whole context.
"""

from __future__ import annotations

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch.nn.functional import scaled_dot_product_attention

REPLACED = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend"


def register() -> None:
    """Register it with SGLang, which calls this in each of its processes."""
    HookRegistry.register(REPLACED, attend, HookType.REPLACE)


def attend(  # noqa: PLR0917 - what SGLang gives it
    _: object,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Fill `output` for the new tokens of each sequence, and return it.

    `query` and `output` have the shape [new tokens, heads, head size], the sequences one after the other; the caches
    [KV slots, KV heads, head size]. The other tensors have a number for each sequence, but `req_to_token`: the KV slot
    of each position [requests, positions].
    """
    if encoder_lens is not None or is_cross_attn or sliding_window_size is not None or not causal:
        raise NotImplementedError("the tiny models of the tests are decoders with full attention")
    start = 0
    sequences = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for request, length, new in sequences:
        slots = req_to_token[request, :length]
        attended = scaled_dot_product_attention(
            query[None, start : start + new].transpose(1, 2),
            k_cache[None, slots].transpose(1, 2),
            v_cache[None, slots].transpose(1, 2),
            attn_mask=torch.ones(new, length, dtype=torch.bool).tril(length - new) if 1 < new < length else None,
            scale=scaling,
            enable_gqa=enable_gqa,
            is_causal=1 < new == length,
        )
        output[start : start + new] = attended[0].transpose(0, 1)
        start += new
    return output
