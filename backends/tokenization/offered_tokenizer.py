"""Tokenizers that engines offer: their files are kept in a folder of the gateway's own, and checked before use.

See docs/design/offered-tokenizers.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import msgspec

from plait.backends.errors import CallerError
from plait.backends.protocol.dialects import ChatForm
from plait.backends.protocol.tokenizer_files import TokenizerFiles
from plait.backends.protocol.tokenizer_fingerprint import TokenizerFingerprint
from plait.backends.tokenization.file_tokenizer import (
    TEMPLATE_KWARGS_FILE,
    EmbeddedTokenizer,
    FileTokenizer,
    HuggingFaceTokenizer,
    file_of,
    shipped_tokenizer,
)
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.template_worker import TemplateWorker


class BoundedTemplates(HuggingFaceTokenizer):
    """A tokenizer whose chat template is not trusted: an engine has offered it, and a template is a program.

    Chats are rendered in a process with limits, which starts now and ends at `close`. Texts are encoded here.
    """

    def __init__(self, name: str, folder: Path) -> None:
        file_of(name, folder)  # before a process starts that could not load it either
        self._worker = TemplateWorker(str(folder))
        with ExitStack() as undo:
            undo.callback(self.close)
            self._worker.start()  # both processes load the tokenizer at the same time
            super().__init__(name, folder)
            undo.pop_all()

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        form: ChatForm = "vllm",
        salt: Hashable = None,  # noqa: ARG002 - nothing is kept
    ) -> str:
        """The text of a chat. Raises `CallerError` also for a template that exceeds the limits."""
        return self._worker.render(
            Job(
                [dict(message) for message in messages],
                chat_template,
                None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt,
                continue_final_message,
                None if template_kwargs is None else dict(template_kwargs),
                form,
            )
        )

    def render_probe(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],  # noqa: ARG002 - the process has them, as functions do not travel
    ) -> str | None:
        try:
            return self._worker.render(Job(messages, None, tools, probe="given"))
        except CallerError:
            return None

    def render_requested(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],  # noqa: ARG002 - as above
    ) -> str | None:
        try:
            return self._worker.render(Job(messages, None, tools, probe="requested"))
        except CallerError:
            return None

    def close(self) -> None:
        self._worker.close()


KEPT: Final = "tokenizers"
"""The folder of kept tokenizers."""

PARTS: Final = ("vocabulary", "ids", "prompt_ids", "chats")
"""The digests of a fingerprint. Its name is not compared."""


def load_offered(
    offer: TokenizerFiles, under: Path, *, trusts_template: bool, chat_template: str | None = None
) -> tuple[FileTokenizer, TokenizerFingerprint]:
    """The tokenizer of an offer, and its fingerprint. The tokenizer's name is its folder, or `embedded`.

    An untrusted chat template is rendered in a process with limits, unless an operator's `chat_template` replaces it.
    Raises ValueError for an offer that differs from its fingerprint, of which no file is then kept.
    """
    offer.check()
    if offer.files == shipped_tokenizer().files():
        shipped = shipped_tokenizer() if chat_template is None else EmbeddedTokenizer(chat_template)
        return shipped, shipped.fingerprint
    folder, is_new = keep(offer, under)
    with ExitStack() as undo:
        if is_new:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
        trusts = trusts_template or chat_template is not None
        kind = partial(HuggingFaceTokenizer, chat_template=chat_template) if trusts else BoundedTemplates
        tokenizer = kind(str(folder), folder)
        undo.callback(tokenizer.close)
        found, _ = tokenizer.fingerprint, tokenizer.requested  # both take their time, which this thread has
        tokenizer.prepare()
        _check(found, offer.fingerprint, PARTS if chat_template is None else PARTS[:-1])
        undo.pop_all()
    return tokenizer, found


def _check(found: TokenizerFingerprint, said: TokenizerFingerprint, parts: Sequence[str]) -> None:
    differing = [part for part in parts if getattr(found, part) != getattr(said, part)]
    if differing:
        raise ValueError(f"the offered tokenizer is not what its fingerprint says: {', '.join(differing)} differ")


def content_name(offer: TokenizerFiles) -> str:
    """A name made from an offer's whole content, so that offers with equal names are equal."""
    content = (sorted(offer.files.items()), sorted(offer.template_kwargs.items()), offer.fingerprint)
    return blake2b(msgspec.msgpack.encode(content), digest_size=16).hexdigest()


def keep(offer: TokenizerFiles, under: Path) -> tuple[Path, bool]:
    """Write the files of a checked offer. Returns their folder, named by the content, and whether it is new.

    Folder and files are the user's alone. Raises ValueError if there is a link in the folder's place.
    """
    folder = under / content_name(offer)
    under.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link, so no tokenizer is kept there")
    if folder.is_dir():
        return folder, False
    draft = Path(mkdtemp(prefix=f".{folder.name}-", dir=under))
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, draft, ignore_errors=True)
        for file, content in offer.files.items():
            _write(draft / file, content)
        if offer.template_kwargs:
            _write(draft / TEMPLATE_KWARGS_FILE, msgspec.json.encode(offer.template_kwargs))
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            return folder, False  # another gateway was faster
    return folder, True


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(content)
