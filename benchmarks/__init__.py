"""Workloads, baselines, experiments and figures: `python -m benchmarks NAME`."""
