"""Local schedulers that Plait's are measured against, the driver that runs them on an engine core, and the metrics."""
