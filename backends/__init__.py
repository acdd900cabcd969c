"""The engine side: HTTP client, protocol, tokenizers, cost profiles, engine adapters, the embedded engine."""
