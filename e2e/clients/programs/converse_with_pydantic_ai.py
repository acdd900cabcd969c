"""A conversation with Pydantic AI: over chat completions, Responses and Messages."""

from __future__ import annotations

from typing import Any

from conversation import KIND, MAX_TOKENS, MODEL, PICTURE_URL, SUMMARY, converse, shell
from program import KEY, URL, V1
from pydantic_ai import Agent, BinaryContent, ModelMessagesTypeAdapter, ModelRequest


def agent() -> Agent:
    """The agent of this kind."""
    if KIND == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings  # noqa: PLC0415
        from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: PLC0415

        thinking: Any = {"type": "enabled", "budget_tokens": 1_024}
        settings: Any = AnthropicModelSettings(anthropic_thinking=thinking, max_tokens=MAX_TOKENS)
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
        return Agent(model, model_settings=settings)
    from pydantic_ai.models.openai import (  # noqa: PLC0415
        OpenAIChatModel,
        OpenAIResponsesModel,
        OpenAIResponsesModelSettings,
    )
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

    provider = OpenAIProvider(base_url=V1, api_key=KEY)
    if KIND == "chat":
        return Agent(OpenAIChatModel(MODEL, provider=provider))
    settings = OpenAIResponsesModelSettings(openai_reasoning_effort="high", openai_reasoning_summary="auto")
    # Such a profile it has for OpenAI's own models; for others it sends a thought's text back.
    profile: Any = {"openai_supports_encrypted_reasoning_content": True} if KIND == "sent" else None
    return Agent(OpenAIResponsesModel(MODEL, provider=provider, profile=profile), model_settings=settings)


AGENT = agent()


@AGENT.tool_plain(retries=5)
def bash(command: str) -> str:
    """Run a command."""
    return shell(command)


@AGENT.tool_plain
def look(place: str) -> BinaryContent:
    """Show a place."""
    return BinaryContent.from_data_uri(PICTURE_URL)


def turn(history: list[Any], prompt: str) -> tuple[list[Any], str]:
    """A turn of the agent's own loop."""
    done = AGENT.run_sync(prompt, message_history=ModelMessagesTypeAdapter.validate_python(history))
    return ModelMessagesTypeAdapter.dump_python(done.all_messages(), mode="json"), done.output


converse(turn, [], ModelMessagesTypeAdapter.dump_python([ModelRequest.user_text_prompt(SUMMARY)], mode="json"))
