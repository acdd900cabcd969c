"""What the gateway does at its own limit: a tenant that floods it, and what others notice."""
