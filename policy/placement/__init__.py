"""Placement chooses the engine of a call. Here are the policies, their costs, and the places of task groups."""
