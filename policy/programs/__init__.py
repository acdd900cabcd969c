"""Calls that depend on each other: their request graph, the objectives deduced from it, and their shared prefixes."""
