"""Calls that depend on each other: sessions, the executor that says when a call may run, and the tasks that run it."""
