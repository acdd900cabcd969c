"""Plait inside SGLang, by SGLang's plugin hooks: the local scheduler's plans, and the cache-state report.

`plait sglang -- <launch_server arguments>` starts it. In every process that it starts, SGLang finds the plugin by its
entry point (`sglang.srt.plugins`). SGLang's files stay untouched.

Imports nothing but the standard library, msgspec, SGLang, `policy`, and modules of `backends` that need no more: an
engine's environment gets Plait with `pip install --no-deps plait`.
"""
