"""The engines as the gateway knows them: the router owns their state, the monitor keeps it fresh."""
