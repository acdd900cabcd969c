"""OpenAI's responses and Anthropic's messages for engines that serve chats."""
