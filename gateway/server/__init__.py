"""The HTTP server that the gateway and the embedded engine run under: uvicorn with bounds on what clients may do."""
