"""What `python -m benchmarks vllm_slo` is made of: servers, workload, load, figures."""
