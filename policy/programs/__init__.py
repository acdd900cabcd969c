"""Calls that depend on each other: the request graph, the objectives deduced from it, and shared prefixes."""
