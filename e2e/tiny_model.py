"""A tiny Llama and a tiny Gemma 3 with random weights, made offline: what real engines serve in these tests.

Their text means nothing, but their tokens depend on every token before them, so that a wrong KV cache shows. The
tokenizer and chat template are the embedded engine's. Weights are stored in float32; an engine's `--dtype` decides what
it computes in.

An engine caches Llama's layers alike. Five of Gemma's six layers attend to the last tokens only, so that an engine
keeps what they need apart from the sixth's, and drops it sooner.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER

CACHE: Final = Path(__file__).parents[1] / ".cache" / "tiny-model"
CONTEXT_TOKENS: Final = 8192
SEED: Final = 1

VOCABULARY, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 8192, 256, 688, 4, 4, 2, 64

_SHAPE: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT_TOKENS,
    "attention_bias": False,
    # Tied to the embeddings, an untrained model says its last token for ever.
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}

LLAMA: Final = {
    **_SHAPE,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "mlp_bias": False,
}

GEMMA_INTERMEDIATE, WINDOW_TOKENS = 512, 512
GEMMA_LAYERS: Final = (*5 * ("sliding_attention",), "full_attention")
"""Gemma 3's pattern, once."""

GEMMA: Final = {
    **_SHAPE,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "intermediate_size": GEMMA_INTERMEDIATE,
    "num_hidden_layers": len(GEMMA_LAYERS),
    "layer_types": GEMMA_LAYERS,
    "sliding_window": WINDOW_TOKENS,
    "query_pre_attn_scalar": HEAD_DIM,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}


def tiny_model() -> Path:
    """The Llama's folder: built on the first call, and again whenever this file or the tokenizer changed."""
    return _built("llama", LLAMA, _llama_weights())


def tiny_gemma() -> Path:
    """The Gemma's folder, which is built as the Llama's."""
    return _built("gemma", GEMMA, _gemma_weights())


def _built(name: str, config: Mapping[str, Any], weights: Iterable[tuple[str, NDArray[np.float32]]]) -> Path:
    files = [Path(__file__), *sorted(path for path in EMBEDDED_FOLDER.iterdir() if path.is_file())]
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
    folder = CACHE / f"{name}-{digest}"
    if not folder.is_dir():
        unfinished = CACHE / f"{folder.name}-{os.getpid()}"
        shutil.copytree(EMBEDDED_FOLDER, unfinished)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2))
        save_file(dict(weights), unfinished / "model.safetensors", metadata={"format": "pt"})
        try:
            unfinished.rename(folder)
        except OSError:  # another run was faster
            shutil.rmtree(unfinished)
    return folder


def _matrix(rng: np.random.Generator, outputs: int, inputs: int) -> NDArray[np.float32]:
    """A matrix that keeps the variance of what it is given: attention and MLP weigh as much as the embeddings do."""
    return rng.standard_normal((outputs, inputs), dtype=np.float32) / np.float32(inputs**0.5)


def _layer_matrices(
    rng: np.random.Generator, layer: int, intermediate: int
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """A layer's matrices, by their names in transformers, which are the same in Llama and Gemma."""
    prefix = f"model.layers.{layer}"
    yield f"{prefix}.self_attn.q_proj.weight", _matrix(rng, HEADS * HEAD_DIM, HIDDEN)
    yield f"{prefix}.self_attn.k_proj.weight", _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{prefix}.self_attn.v_proj.weight", _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN)
    yield f"{prefix}.self_attn.o_proj.weight", _matrix(rng, HIDDEN, HEADS * HEAD_DIM)
    yield f"{prefix}.mlp.gate_proj.weight", _matrix(rng, intermediate, HIDDEN)
    yield f"{prefix}.mlp.up_proj.weight", _matrix(rng, intermediate, HIDDEN)
    yield f"{prefix}.mlp.down_proj.weight", _matrix(rng, HIDDEN, intermediate)


def _llama_weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    rng = np.random.default_rng(SEED)
    yield "model.embed_tokens.weight", rng.standard_normal((VOCABULARY, HIDDEN), dtype=np.float32)
    for layer in range(LAYERS):
        yield from _layer_matrices(rng, layer, INTERMEDIATE)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{norm}.weight", np.ones(HIDDEN, dtype=np.float32)
    yield "model.norm.weight", np.ones(HIDDEN, dtype=np.float32)
    yield "lm_head.weight", _matrix(rng, VOCABULARY, HIDDEN)


def _gemma_weights() -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Gemma multiplies embeddings by the root of the hidden size, and norms by one more than their weights."""
    rng = np.random.default_rng(SEED)
    yield "model.embed_tokens.weight", _matrix(rng, VOCABULARY, HIDDEN)
    for layer in range(len(GEMMA_LAYERS)):
        prefix = f"model.layers.{layer}"
        yield from _layer_matrices(rng, layer, GEMMA_INTERMEDIATE)
        for norm in ("self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}.{norm}.weight", np.zeros(HEAD_DIM, dtype=np.float32)
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{prefix}.{place}_layernorm.weight", np.zeros(HIDDEN, dtype=np.float32)
    yield "model.norm.weight", np.zeros(HIDDEN, dtype=np.float32)
    yield "lm_head.weight", _matrix(rng, VOCABULARY, HIDDEN)
