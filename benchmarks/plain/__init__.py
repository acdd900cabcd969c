"""What a plain call costs the gateway: an engine, a load, and gateways of several checkouts."""
