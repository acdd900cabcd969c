"""A tiny Llama with random weights, made offline: what real engines serve in these tests.

Its text means nothing, but its tokens depend on every token before them, so that a wrong KV cache shows. The tokenizer
and chat template are the embedded engine's. Weights are stored in float32; an engine's `--dtype` decides what it
computes in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER

CACHE: Final = Path(__file__).parents[1] / ".cache" / "tiny-model"
CONTEXT_TOKENS: Final = 8192
SEED: Final = 1

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 8192, 256, 688, 4, 4, 2, 64

CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    # Tied to the embeddings, an untrained model says its last token for ever.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def tiny_model() -> Path:
    """The model's folder: built on the first call, and again whenever this file or the tokenizer changed."""
    files = [Path(__file__), *sorted(path for path in EMBEDDED_FOLDER.iterdir() if path.is_file())]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = CACHE / digest
    if not folder.is_dir():
        unfinished = CACHE / f"{digest}-{os.getpid()}"
        _write(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder


def _write(folder: Path) -> None:
    shutil.copytree(EMBEDDED_FOLDER, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    save_file(dict(_weights()), folder / "model.safetensors", metadata={"format": "pt"})


def _weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every parameter by its name in transformers.

    Each matrix keeps the variance of what it is given, so that attention and MLP weigh as much as the embeddings do.
    """
    rng = np.random.default_rng(SEED)

    def matrix(outputs: int, inputs: int) -> NDArray[np.float32]:
        return rng.standard_normal((outputs, inputs), dtype=np.float32) / np.float32(inputs**0.5)

    yield "model.embed_tokens.weight", rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE)
        yield f"{prefix}.input_layernorm.weight", np.ones(HIDDEN, dtype=np.float32)
        yield f"{prefix}.post_attention_layernorm.weight", np.ones(HIDDEN, dtype=np.float32)
    yield "model.norm.weight", np.ones(HIDDEN, dtype=np.float32)
    yield "lm_head.weight", matrix(VOCABULARY, HIDDEN)
