"""The local schedulers and their parts. A local scheduler decides what an engine computes next."""
