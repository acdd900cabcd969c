"""The prefixes that each engine has cached: chained block hashes, the prefix tree over them, and residency."""
