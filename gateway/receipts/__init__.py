"""Receipts: for each call what was compared when it was placed, what it waited for, and what came of it."""
