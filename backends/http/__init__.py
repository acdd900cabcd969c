"""The HTTP client of the data path. It parses with httptools."""
