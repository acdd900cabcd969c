"""The embedded engine: an emulated GPU behind a real OpenAI server."""
