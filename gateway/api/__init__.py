"""The HTTP routes, their API keys, and the form of their answers."""
