"""From messages to token ids, as the engine does it."""
