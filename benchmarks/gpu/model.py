"""The model that is served on a GPU without its weights: a shape, and a tokenizer of as many tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER

VOCABULARY: Final = 128_256

LLAMA_8B: Final = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
"""Llama-3.1-8B's shape."""

TINY: Final = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""What a CPU serves in a rehearsal."""


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Write a model's files without weights; an engine makes some up (`--load-format dummy`)."""
    shutil.copytree(EMBEDDED_FOLDER, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(padded(json.loads(tokenizer.read_text(encoding="utf-8")))), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "bfloat16",
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def padded(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with `VOCABULARY` tokens. No merge makes the added ones, so that no text is encoded to them."""
    vocabulary = tokenizer["model"]["vocab"]
    known = set(vocabulary.values()) | {token["id"] for token in tokenizer.get("added_tokens", ())}
    added = {f"<|pad_{number}|>": number for number in range(VOCABULARY) if number not in known}
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocabulary | added}}
