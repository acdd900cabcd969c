"""Plait inside vLLM: the local scheduler behind vLLM's own, and the cache-state report; vLLM's files stay untouched.

`plait vllm -- <vllm serve arguments>` starts it; by hand these flags of `vllm serve` do the same:

    --scheduler-cls plait.backends.vllm.scheduler.create_scheduler
    --middleware plait.backends.vllm.middleware.CacheStateMiddleware

Imports nothing but the standard library, msgspec, vLLM, `policy`, and modules of `backends` that need no more: an
engine's environment gets Plait with `pip install --no-deps plait`.
"""
