"""Batches beside online calls, and the order of their lines, in virtual time."""
