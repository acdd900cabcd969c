"""Which engine a call runs on: the policies by name, what they weigh, and places kept for task groups."""
