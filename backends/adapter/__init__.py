"""The shared parts of the engine adapters: vLLM's, SGLang's and the embedded engine's."""
