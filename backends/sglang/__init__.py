"""Plait inside SGLang, by its plugin hooks: the local scheduler's plans, and the cache-state report.

`plait sglang -- <launch_server arguments>` starts it. SGLang finds the plugin by its entry point (`sglang.srt.plugins`)
in every process that it starts; none of its files is touched.

Imports nothing but the standard library, msgspec, SGLang, `policy`, and modules of `backends` that need no more: an
engine's environment gets Plait with `pip install --no-deps plait`.
"""
