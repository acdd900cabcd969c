"""Reads engines' answers, whole or as streams."""
