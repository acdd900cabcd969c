"""A tokenizer of which the chat template is not trusted: an engine offered it, and a template is a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from plait.backends.errors import CallerError
from plait.backends.tokenization.huggingface import HuggingFaceTokenizer
from plait.backends.tokenization.template_process import Job
from plait.backends.tokenization.template_worker import TemplateWorker


class BoundedTemplates(HuggingFaceTokenizer):
    """Renders chats in a process with limits, which starts now and ends at `close`. Texts are encoded here."""

    def __init__(self, name: str, folder: Path) -> None:
        self._worker = TemplateWorker(str(folder))
        with ExitStack() as undo:
            undo.callback(self.close)
            self._worker.start()  # it loads while this process does
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
    ) -> str:
        """The text of a chat. Raises `CallerError` also for a template that takes more than its share."""
        return self._worker.render(
            Job(
                [dict(message) for message in messages],
                chat_template,
                None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt,
                continue_final_message,
                None if template_kwargs is None else dict(template_kwargs),
            )
        )

    def render_probe(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],  # noqa: ARG002 - the process has them, as functions do not travel
    ) -> str | None:
        """A chat by the model's template, given to it as it is; None if it refuses the chat."""
        try:
            return self._worker.render(Job(messages, None, tools, is_probe=True))
        except CallerError:
            return None

    def close(self) -> None:
        """End the process."""
        self._worker.close()
