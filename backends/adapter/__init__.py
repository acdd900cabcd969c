"""What the engine adapters share: each of vLLM, SGLang and the embedded engine takes from here what it needs."""
