"""Pure scheduling: no I/O, no clock, no asyncio and no random numbers. It imports only the standard library."""
