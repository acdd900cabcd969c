"""OpenAI's files and batches: requests of which nobody waits for an answer (docs/batches.md)."""
