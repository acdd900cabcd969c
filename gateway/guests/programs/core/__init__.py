"""Calls that depend on each other: sessions, and the executor that decides when a call may run. Synchronous."""
