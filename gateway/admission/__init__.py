"""Which calls may be placed now, which wait in the gateway, and which are refused."""
