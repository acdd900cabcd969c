"""The subcommands of `plait` that emulate or measure."""
