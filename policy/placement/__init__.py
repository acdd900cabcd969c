"""Placement chooses the engine of a call: the policies, and how an engine that drains hands its prefixes over."""
