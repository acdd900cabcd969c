"""The configuration: its sections and values, its file, and what a change of it changes."""
