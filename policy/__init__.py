"""Pure scheduling: no I/O, no clock, no asyncio, no randomness of its own; the standard library only."""
