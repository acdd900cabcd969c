"""The messages between gateway and engines: OpenAI's requests, our annotations, cache-state reports."""
