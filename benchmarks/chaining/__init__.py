"""What `python -m benchmarks chained_calls` is made of: a gateway in this process, the measurement, figures."""
