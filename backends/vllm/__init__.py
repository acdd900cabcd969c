"""Plait inside vLLM: the local scheduler plans for vLLM's own, and vLLM reports its cache. vLLM's files stay untouched.

`plait vllm -- <vllm serve arguments>` starts it. These flags of `vllm serve` do the same by hand:

    --scheduler-cls plait.backends.vllm.scheduler.create_scheduler
    --middleware plait.backends.vllm.middleware.CacheStateMiddleware

Imports only the standard library, msgspec, vLLM, `policy`, and modules of `backends` that import no more than that. So
Plait without an extra is enough in an engine's environment, and vLLM has all that it needs.
"""
