"""tiktoken's encodings with ChatML's special tokens, from tiktoken's registry or from a local file of ranks."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tiktoken

from plait.backends.tokenization.cuts import CL100K, O200K


@dataclass(frozen=True, slots=True)
class Split:
    """An encoding without its ranks. `chatml_start` is the id of <|im_start|>; <|im_end|> has the next id."""

    pattern: str
    special_tokens: dict[str, int]
    chatml_start: int


# tiktoken's registry gives these only together with a download of the ranks. The keys are the encodings' published
# names. The ChatML ids are those of OpenAI's chat models.
SPLITS: Final = {
    "cl100k_base": Split(
        pattern=CL100K,
        special_tokens={
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        chatml_start=100264,
    ),
    "o200k_base": Split(
        pattern=O200K,
        special_tokens={"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        chatml_start=200264,
    ),
}


def load_encoding(name: str) -> tiktoken.Encoding:
    """The encoding of a registered name or of a `.tiktoken` file. The file's name must contain the encoding's name.

    Raises ValueError. Its message says what to provide.
    """
    if "/" in name or name.endswith(".tiktoken"):
        return _local(Path(name).expanduser())
    return _registered(name)


def _registered(name: str) -> tiktoken.Encoding:
    known = tiktoken.list_encoding_names()
    if name not in known:
        raise ValueError(f"tiktoken has no encoding {name!r}; it has {', '.join(known)}")
    try:
        base = tiktoken.get_encoding(name)
    except OSError as error:
        by_file = f" and use 'tiktoken:/path/to/{name}.tiktoken'" if name in SPLITS else ""
        raise ValueError(
            f"tiktoken has not cached {name!r} and cannot download it ({error}); download {name}.tiktoken on a machine "
            f"with a network{by_file}, or copy a filled cache and set TIKTOKEN_CACHE_DIR"
        ) from error
    # tiktoken documents this way of extending an encoding, through its private fields.
    return _with_chatml(
        name,
        base._pat_str,  # noqa: SLF001
        base._mergeable_ranks,  # noqa: SLF001
        base._special_tokens,  # noqa: SLF001
        SPLITS[name].chatml_start if name in SPLITS else base.n_vocab,
    )


def _local(path: Path) -> tiktoken.Encoding:
    name = next((known for known in SPLITS if known in path.name), None)
    if name is None:
        raise ValueError(f"{path}: the file's name must contain its encoding, {' or '.join(SPLITS)}")
    split = SPLITS[name]
    return _with_chatml(name, split.pattern, _read_ranks(path), split.special_tokens, split.chatml_start)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of a token in base64 and its rank. tiktoken's own reader would cache the file by its path."""
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a file of tiktoken ranks: {error}") from error


def _with_chatml(
    name: str, pattern: str, ranks: dict[bytes, int], special_tokens: dict[str, int], chatml_start: int
) -> tiktoken.Encoding:
    chatml = {"<|im_start|>": chatml_start, "<|im_end|>": chatml_start + 1}
    return tiktoken.Encoding(
        name=f"{name}_chatml", pat_str=pattern, mergeable_ranks=ranks, special_tokens=chatml | special_tokens
    )
