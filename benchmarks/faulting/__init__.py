"""The parts of `faults` and `soak`: gateways and engines as processes, the load, the cases and what they show."""
