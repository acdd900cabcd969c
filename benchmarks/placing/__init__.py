"""Parts of the placement benchmarks."""
