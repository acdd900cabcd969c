"""The admin API: an operator adds, drains and removes engines."""
