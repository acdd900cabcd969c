"""The guests: what the kernel serves calls without. Each is a room, and comes in by the doors of `gateway/doors.py`."""
