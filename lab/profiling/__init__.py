"""Measures a live engine and fits a cost profile to it."""
