"""The HTTP client of the data path, on httptools."""
