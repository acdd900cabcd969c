"""The engines as the gateway knows them. The router owns their state, and the monitor keeps it up to date."""
