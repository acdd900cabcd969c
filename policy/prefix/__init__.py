"""What is cached where: chained block hashes, the prefix tree over them, and each engine's residency."""
