"""What is cached where: chained block hashes, the prefix tree over them, and what each engine holds of it."""
