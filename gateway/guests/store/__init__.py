"""An event log that outlives the process: streams of events, written in order, and read again at the next start."""
