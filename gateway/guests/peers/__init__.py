"""The gateways that serve the same clients, and how they answer as one."""
