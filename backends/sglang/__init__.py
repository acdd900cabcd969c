"""Plait inside SGLang: the local scheduler plans for SGLang's own, and SGLang reports its cache.

`plait sglang -- <launch_server arguments>` starts it. Plait is a plugin: each of SGLang's processes finds it by its
entry point (`sglang.srt.plugins`). SGLang's files stay untouched.

The package imports only the standard library, msgspec, SGLang, `policy`, and modules of `backends` that import no more
than that. So SGLang's environment needs Plait without extras, and nothing else.
"""
