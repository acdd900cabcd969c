"""Train the tokenizer of the embedded engine: `python -m benchmarks.train_tokenizer OUT_DIR`.

A byte-level BPE of 8,192 entries, from text that every Python installation has: the language reference, docstrings,
comments and the licence as prose, and JSON schemas of the standard library's functions. The same Python version and
the same `tokenizers` version write the same files, byte for byte.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import json
import shutil
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE: Final = Path(__file__).parents[1] / "backends" / "tokenization" / "embedded" / "chat_template.jinja"
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY_TOKENS: Final = 8192
CONTEXT_TOKENS: Final = 131_072

# Folders whose prose is test data, tables or another project's.
SKIPPED_FOLDERS: Final = frozenset(
    {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "ensurepip", "turtledemo", "pydoc_data"}
)
# One file in this many also goes in whole: enough code for indentation and operators to have tokens.
CODE_EVERY_FILES: Final = 16
# Modules whose functions are described as JSON schemas.
SCHEMA_MODULES: Final = (
    "argparse", "asyncio", "calendar", "csv", "datetime", "difflib", "email", "functools", "heapq", "html", "imaplib",
    "itertools", "json", "locale", "logging", "mailbox", "math", "os", "pathlib", "random", "re", "shutil", "smtplib",
    "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile", "textwrap", "urllib.parse", "urllib.request",
    "zipfile",
)  # fmt: skip

ENGLISH_SAMPLE: Final = """\
When the ferry reached the island it was already dark, and the harbour master had gone home. We carried the boxes up
the hill ourselves, resting at every bend, and talked about what each of us would have done with another year. Nobody
wanted to be the first to say that the plan had failed. In the morning the weather was clear, the market opened as
usual, and a letter was waiting: the company would pay for the repairs after all, provided that the work started
before the end of the month and that every invoice was sent to its office in the capital.
"""
JSON_SAMPLE: Final = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather in a given city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city, for example Lisbon"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city"],
            },
        },
    }
)


def stdlib_sources() -> list[str]:
    """The text of the standard library's Python files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in root.rglob("*.py") if SKIPPED_FOLDERS.isdisjoint(f.relative_to(root).parts))
    return [f.read_text(encoding="utf-8", errors="ignore") for f in files]


def reflowed(text: str) -> str:
    """Prose as people send it: a paragraph is one line, indented blocks stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if "\n " in p or p.startswith(" ") else " ".join(p.split()) for p in paragraphs)


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module and of everything in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield reflowed(text)


def comments(source: str) -> Iterator[str]:
    """Blocks of comments on consecutive lines, without their marks."""
    block: list[str] = []
    last_line = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last_line + 1:
            yield " ".join(block)
            block = []
        block.append(token.string.lstrip("#!").strip())
        last_line = line
    if block:
        yield " ".join(block)


def json_type(parameter: inspect.Parameter) -> str:
    """A parameter's type in a JSON schema, going by its default."""
    names = {bool: "boolean", int: "integer", float: "number", list: "array", tuple: "array", dict: "object"}
    return names.get(type(parameter.default), "string")


def function_schema(name: str, function: Callable[..., Any]) -> dict[str, Any] | None:
    """A function as the JSON schema of a tool; None where it has no signature or no description."""
    description = inspect.getdoc(function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return None
    if not description or not parameters:
        return None
    properties = {
        p.name: {"type": json_type(p), "description": f"The {p.name.replace('_', ' ').strip()} to use."}
        for p in parameters.values()
    }
    required = [p.name for p in parameters.values() if p.default is p.empty]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    summary = " ".join(description.split("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": schema}}


def json_texts() -> Iterator[str]:
    """Schemas of the standard library's functions, in the three layouts that clients send."""
    for module_name in SCHEMA_MODULES:
        module = importlib.import_module(module_name)
        for name, function in sorted(inspect.getmembers(module, inspect.isroutine)):
            schema = None if name.startswith("_") else function_schema(name, function)
            if schema is not None:
                yield json.dumps(schema)
                yield json.dumps(schema, separators=(",", ":"))
                yield json.dumps(schema, indent=2)
                yield json.dumps({"role": "user", "content": schema["function"]["description"]})


def corpus() -> Iterator[str]:
    """The training text, one document at a time."""
    yield from (reflowed(topics.topics[name]) for name in sorted(topics.topics))
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.exists():
        yield reflowed(licence.read_text(encoding="utf-8"))
    for index, source in enumerate(stdlib_sources()):
        yield from docstrings(source)
        yield from comments(source)
        if index % CODE_EVERY_FILES == 0:
            yield source
    yield from json_texts()


def train(texts: Iterator[str], vocabulary_tokens: int = VOCABULARY_TOKENS) -> Tokenizer:
    """The BPE: every byte is in the alphabet and nothing is normalised, so that any text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=list(SPECIAL_TOKENS),
        # The trainer takes a character set; sorted, because its order gives the ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write Hugging Face's files: the tokenizer, its configuration, the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.loads(tokenizer.to_str())
    fields["model"]["merges"] = [" ".join(pair) for pair in fields["model"]["merges"]]  # shorter than lists of two
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    template = folder / CHAT_TEMPLATE.name
    if not (template.exists() and template.samefile(CHAT_TEMPLATE)):
        shutil.copyfile(CHAT_TEMPLATE, template)


def main() -> None:
    """Train, save, and print how many characters a token covers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_tokenizer", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT_DIR", help="where the files are written")
    folder: Path = parser.parse_args().folder
    tokenizer = train(corpus())
    save(tokenizer, folder)
    for name, sample in (("English", ENGLISH_SAMPLE), ("a JSON schema", JSON_SAMPLE)):
        tokens = len(tokenizer.encode(sample).ids)
        print(f"{name}: {len(sample) / tokens:.2f} characters a token ({len(sample)} characters, {tokens} tokens)")
    size_bytes = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder}: {tokenizer.get_vocab_size()} entries, {size_bytes / 1000:.0f} kB")


if __name__ == "__main__":
    main()
