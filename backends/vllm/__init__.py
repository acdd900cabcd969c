"""Plait inside vLLM: the local scheduler plans for vLLM's own, and vLLM reports its cache. vLLM's files stay untouched.

`plait vllm -- <vllm serve arguments>` starts it. These flags of `vllm serve` do the same by hand:

    --scheduler-cls plait.backends.vllm.scheduler.create_scheduler
    --middleware plait.backends.vllm.middleware.CacheStateMiddleware

The package imports only the standard library, msgspec, vLLM, `policy`, and modules of `backends` that import no more
than that. So vLLM's environment needs Plait without extras, and nothing else.
"""
