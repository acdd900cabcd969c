"""docs/results.md: what the stored reports of benchmarks say, beside what the papers say."""
