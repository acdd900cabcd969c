"""The HTTP server of the gateway and the embedded engine: uvicorn with connections of our own, within bounds."""
