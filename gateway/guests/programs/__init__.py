"""Calls that depend on each other: reads them, fills in their inputs, runs them, and records their answers."""
