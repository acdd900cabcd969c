"""Traces: what became of a call as spans of OpenTelemetry, through to its engine."""
