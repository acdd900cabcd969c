"""Placement chooses the engine of a call. Here are the policies, and the places of task groups."""
