"""What `gpu_archive`, `gpu_smoke` and `gpu_run` are made of: a vLLM that travels, and what is measured on it."""
