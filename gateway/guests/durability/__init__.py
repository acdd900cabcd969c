"""Durable sessions: they are made again from their records, and given from one gateway to the next."""
