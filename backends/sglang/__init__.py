"""Plait inside SGLang: the local scheduler plans for SGLang's own, and SGLang reports its cache.

`plait sglang -- <launch_server arguments>` starts it. Plait is a plugin: each of SGLang's processes finds it by its
entry point (`sglang.srt.plugins`). SGLang's files stay untouched.

Imports only the standard library, msgspec, SGLang, `policy`, and modules of `backends` that import no more than that.
So Plait without an extra is enough in an engine's environment, and SGLang has all that it needs.
"""
