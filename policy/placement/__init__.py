"""Placement, which chooses the engine of a call: the policies by name, their costs, and places for task groups."""
