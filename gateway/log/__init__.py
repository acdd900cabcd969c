"""The log: events as lines on stderr, which a server writes in the background."""
