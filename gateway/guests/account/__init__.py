"""Keys that are issued by the API, what tenants and keys have used, and what they may use (docs/accounts.md)."""
