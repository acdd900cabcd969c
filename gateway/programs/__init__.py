"""Calls that depend on each other: sessions, the executor that wakes calls, and the shells that run them."""
