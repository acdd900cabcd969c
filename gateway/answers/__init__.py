"""Engines' answers: what is read of them, whole or as streams."""
