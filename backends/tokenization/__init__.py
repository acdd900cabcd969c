"""Turns messages into token ids, as the engine does."""
