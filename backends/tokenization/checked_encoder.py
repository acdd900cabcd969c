"""Encodes texts with fastokens, which takes a tenth of the time of `tokenizers`, while both give the same ids.

The engines encode with `tokenizers`, so its ids are the right ones. The native encoder is compared on probe texts at
the start, then on the first PROVING_PROMPTS prompts of the machine, which still get the ids of `tokenizers`, and then
on one prompt in EACH. The first difference ends its use in this process. docs/design/native-encoder.md has the reasons.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import count, pairwise
from typing import Any, Final, TypeVar

import msgspec
import structlog

from plait.backends.tokenization.kept_proof import KeptProof

PROVING_PROMPTS: Final = 10_000
"""How many prompts both encode before the native encoder's ids are used."""

EACH: Final = 1_000
"""Later, both encode one prompt in this many, which costs a few microseconds a prompt."""

KEPT_EACH: Final = 500
"""So many equal prompts are added to the kept proof at a time."""

EDGES: Final = (
    "\0", "a\0b", " " * 5_000, "\n" * 300, "\r\n \r\n\t" * 100, "a" * 5_000, "7" * 5_000, "\u0301" * 300, "\u200d" * 40,
    "e\u0301\u0323\u0301 \u1112\u1161\u11ab\u11a8 \uac00\u11a8 \u212b \ufb03 \U0001d538",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 40,
    "\u202e\u2066a\u2069\ufeff\ufffe\uffff\U0010ffff\U000e0041", "don't DON'T 'S 'Ll '\u017f",
    "\u2581\u2581a \u2581 b\u2581", "x=1;\n" * 500,
)  # fmt: skip
"""Long runs, code points that normalizers and patterns disagree on, and characters without a glyph."""

log = structlog.get_logger(__name__)

T = TypeVar("T")
Given = TypeVar("Given")

Encode = Callable[[Sequence[str]], "list[array[int]]"]
"""The ids of each text, without special tokens around it."""

NativeEncode = Callable[[Sequence[str]], "list[array[int]] | None"]
"""As `Encode`, or None for texts that it cannot encode."""


class CheckedEncoder:
    """The ids of texts as `reference` gives them, by `native` while that is trusted; safe to call from several threads.

    `equal` is how many prompts had the same ids by both. `differences` is 1 once a prompt had not: then earlier ids of
    `native` may be wrong too. `name` is the tokenizer's, for the log.
    """

    def __init__(self, name: str, reference: Encode, native: NativeEncode | None) -> None:
        self.equal = 0
        self.differences = 0
        self._proof: KeptProof | None = None
        self._proving_prompts = PROVING_PROMPTS
        self._name = name
        self._reference = reference
        self._native = native
        self._numbers = count(1)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"CheckedEncoder(native: {self.is_native}, {self.equal} equal, {self.differences} different)"

    @property
    def is_native(self) -> bool:
        """Whether there is a native encoder, and no text has shown a difference."""
        return self._native is not None

    @property
    def has_proved_itself(self) -> bool:
        """Whether the native encoder's ids are used by now."""
        return self._native is not None and self.equal >= self._proving_prompts

    def probe(self, texts: Iterable[str]) -> None:
        """Compare both on each text, twice, because the native encoder may cache the ids of words."""
        for text in (*texts, *EDGES):
            for _ in range(2):
                if self._native is not None:
                    self._compared(self._native([text]), [text])
        self.equal = 0

    def go_on(self, proof: KeptProof) -> None:
        """Count the prompts of other processes, and add those of this one."""
        self._proof, self._proving_prompts = proof, max(0, PROVING_PROMPTS - proof.prompts())

    def encode(self, texts: Sequence[str]) -> list[array[int]]:
        """The ids of a prompt, or of the parts of one. Raises `CallerError` for text that is not valid Unicode."""
        native = self._native
        if native is None:
            return self._reference(texts)
        ids = native(texts)
        if ids is not None and self.equal >= self._proving_prompts and next(self._numbers) % EACH:
            return ids
        return self._compared(ids, texts)

    def _compared(self, ids: list[array[int]] | None, texts: Sequence[str]) -> list[array[int]]:
        wanted = self._reference(texts)  # raises for what is not Unicode, which is no difference
        with self._lock:
            if ids == wanted:
                self.equal += 1
                if self._proof is not None and not self.equal % KEPT_EACH:
                    left = max(0, PROVING_PROMPTS - self._proof.add(KEPT_EACH))  # all, where nothing can be written
                    self._proving_prompts = min(self._proving_prompts, self.equal + left)
            elif self._native is not None:
                self._native = None
                self.differences += 1
                if self._proof is not None:
                    self._proof.clear()
                log.warning(
                    "native encoder given up",
                    tokenizer=self._name,
                    text_sha256=sha256("".join(texts).encode()).hexdigest(),
                    equal=self.equal,
                    hint="ids are exact, and take more time: report this tokenizer and the version of fastokens",
                )
        return wanted


def native_encode(files: Mapping[str, Any], *, splits_special_tokens: bool) -> NativeEncode | None:
    """The encoder of fastokens for a decoded `tokenizer.json`; None if it is not installed or does not read this kind.

    With `splits_special_tokens`, the text of a special token is encoded as any other.
    """
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # a long text would take all cores: a turn has one
    try:
        from fastokens import Tokenizer  # noqa: PLC0415 - some machines have no wheel of it
    except ImportError:
        return None
    # Only encoding is needed: it refuses decoders and post-processors that it does not know.
    encoding = msgspec.json.encode({**files, "decoder": None, "post_processor": None}).decode()
    tokenizer = _unless_it_fails(Tokenizer.from_json_str, encoding)
    if tokenizer is None:
        return None
    encode = partial(tokenizer.encode_batch_flat, split_special_tokens=splits_special_tokens)

    def ids(texts: Sequence[str]) -> list[array[int]] | None:
        found = _unless_it_fails(encode, texts)
        if found is None:
            return None
        data, offsets = found
        if len(texts) == 1:
            return [array("I", data)]
        places = array("Q", offsets)
        return [array("I", data[4 * begin : 4 * end]) for begin, end in pairwise(places)]

    return ids


def _unless_it_fails(work: Callable[[Given], T], given: Given) -> T | None:
    """Call a library of Rust. Returns None if the library fails or panics; a panic is no `Exception`."""
    try:
        return work(given)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # noqa: BLE001 - whatever it raises, `tokenizers` takes its place
        return None
