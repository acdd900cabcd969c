"""Calls that depend on each other, on their way: read, filled with their inputs, run, and their answers kept."""
