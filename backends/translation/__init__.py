"""Other APIs, spoken over chat completions: OpenAI's Responses and Anthropic's Messages."""
