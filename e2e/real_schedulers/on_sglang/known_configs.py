"""Lets an older SGLang name configurations of models that transformers, newer here than it expects, has too by now.

A pytest plugin, since it has to come before SGLang.
"""

from __future__ import annotations

from functools import partial

from transformers import AutoConfig

AutoConfig.register = partial(AutoConfig.register, exist_ok=True)  # type: ignore[method-assign]
