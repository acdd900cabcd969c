"""Small programs that use the gateway, each runnable by itself."""
