"""Turns messages into the token ids that the engine would compute."""
