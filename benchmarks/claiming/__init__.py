"""Parts of the table of what is claimed."""
