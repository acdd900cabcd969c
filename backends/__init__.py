"""Everything on the engine side: client, cache-state format, cost profiles, the embedded engine."""
