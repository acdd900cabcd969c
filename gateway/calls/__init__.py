"""One call's way: read, tokenized, placed, relayed, counted."""
