"""The gateway: OpenAI routes, placement, relay, operations and the command line."""
