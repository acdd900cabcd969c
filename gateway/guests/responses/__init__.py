"""OpenAI's responses: stored, continued, and generated in the background."""
