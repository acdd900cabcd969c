"""Parts that the adapters of vLLM, SGLang and the embedded engine share."""
