"""Folders with the files of tokenizers, each different from all others, as engines and gateways load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from plait.backends.tokenization.chat_template import EMBEDDED_FOLDER
from tests.backends.tokenization.trained import VARIANTS, files_of, raw, with_added

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED: Final = "{{ strftime_now('%d %B %Y %H:%M:%S.%f') }} " + TEMPLATE
"""A template that never renders the same text twice."""


def folder_of(parent: Path, name: str, files: dict[str, Any], template: str | None = TEMPLATE) -> Path:
    """A folder with these files."""
    folder = parent / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(files))
    config = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def with_bos(files: dict[str, Any]) -> dict[str, Any]:
    """The files of a tokenizer that puts a token before each prompt."""
    tokenizer = raw(files)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    changed: dict[str, Any] = json.loads(tokenizer.to_str())
    return changed


def tokenizer_folders(parent: Path) -> dict[str, Path]:
    """All the folders, by name."""
    gpt_2 = files_of("gpt-2")
    others = {
        "with a BOS": (with_bos(gpt_2), TEMPLATE),
        "with another template": (gpt_2, TEMPLATE.replace("\n", "")),
        "without a template": (gpt_2, None),
        "with a date": (gpt_2, DATED),
        "with a token more": (with_added(gpt_2, AddedToken("<think>", special=True)), TEMPLATE),
        "with a token that strips": (with_added(gpt_2, AddedToken("<think>", special=True, rstrip=True)), TEMPLATE),
    }
    folders = {name: folder_of(parent, name, files_of(name)) for name in VARIANTS}
    folders |= {name: folder_of(parent, name, *made) for name, made in others.items()}
    return {**folders, "embedded": EMBEDDED_FOLDER}
