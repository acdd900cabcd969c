"""The path of one call: read, tokenized, placed, relayed, counted."""
