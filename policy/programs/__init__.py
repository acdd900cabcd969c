"""Calls that depend on each other: the request graph, the objectives deduced on it, what prompts share."""
