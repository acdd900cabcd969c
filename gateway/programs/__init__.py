"""Calls that depend on each other: sessions, and the executor that says when a call may run. Synchronous."""
