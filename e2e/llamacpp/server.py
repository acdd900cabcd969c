"""llama.cpp's server over a tiny model with random weights, in `.venv-llamacpp`: its only argument is JSON.

It needs no module of ours: that environment has none of what they import.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 64, 128, 2, 4, 2, 16
BYTES = 256
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def write_model(path: Path, context_tokens: int) -> None:
    """A Llama whose tokens are bytes."""
    special = [b"<unk>", b"<s>", b"</s>"]
    tokens = [*special, *(b"<0x%02X>" % byte for byte in range(BYTES))]
    words = [f"\u2581w{number}".encode() for number in range(VOCABULARY - len(tokens))]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(context_tokens)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *words])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([*kinds, *[gguf.TokenType.BYTE] * BYTES, *[gguf.TokenType.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in weights().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def weights() -> dict[str, Any]:
    """Every tensor by its name in a GGUF file."""
    random = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> Any:
        return (random.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    found = {"token_embd": matrix(VOCABULARY, HIDDEN), "output": matrix(VOCABULARY, HIDDEN), "output_norm": ones}
    for layer in range(LAYERS):
        block = {
            "attn_norm": ones,
            "attn_q": matrix(HEADS * HEAD_DIM, HIDDEN),
            "attn_k": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": matrix(HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": ones,
            "ffn_gate": matrix(INTERMEDIATE, HIDDEN),
            "ffn_up": matrix(INTERMEDIATE, HIDDEN),
            "ffn_down": matrix(HIDDEN, INTERMEDIATE),
        }
        found |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return {f"{name}.weight": tensor for name, tensor in found.items()}


def serve(port: int, folder: str, slots: int, context_tokens: int, *, metrics: bool) -> None:
    """Serve until a signal. Each slot has a context of `context_tokens`."""
    path = Path(folder, "tiny.gguf")
    write_model(path, context_tokens)
    options = xllamacpp.CommonParams()
    options.model.path, options.model_alias = str(path), {"demo"}
    options.hostnames, options.port = ["127.0.0.1"], port
    options.n_parallel, options.n_ctx, options.kv_unified = slots, slots * context_tokens, False
    options.endpoint_metrics = metrics
    options.cpuparams.n_threads, options.n_threads_http, options.warmup = 1, 4, False
    _server = xllamacpp.Server(options)
    signal.pause()


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
