"""What emulates and measures engines and serves no traffic: embedded engines, simulation and profiling."""
