"""What `python -m benchmarks engine_slo` is made of: servers, workload, load, figures."""
