"""The HTTP server of the gateway and the embedded engine: uvicorn with bounds. It says how each request ends."""
