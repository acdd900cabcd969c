"""The intake of requests: fair turns for tenants, and bodies, which are decoded and counted against limits."""
