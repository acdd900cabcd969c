"""Requests as they come in: whose begins next, and their bodies, decoded and counted."""
