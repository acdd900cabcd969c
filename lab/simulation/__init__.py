"""The router and embedded engines in virtual time, workloads for them, and `plait demo --compare`."""
