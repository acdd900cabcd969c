"""SGLang's entry point into Plait: SGLang calls `register` in each process that it starts.

A server gets the plugin if its environment has settings for it, as `plait sglang` gives it. Any other server of an
environment with Plait, such as one in which Plait's client is used, runs as if Plait were not there.
If `register` raises, SGLang logs the error and goes on without the plugin. The API server's hook is registered first,
so that `/cache_state` can then report the error.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial
from typing import Any, Final

from plait.backends.adapter.required_names import load
from plait.backends.adapter.scheduler_settings import VARIABLE, read_settings
from plait.backends.sglang.channel import NewsReceiver
from plait.backends.sglang.compatibility import REQUIRED, rank_count

SCHEDULER: Final = "sglang.srt.managers.scheduler"
API_SERVER: Final = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
KV_CACHE: Final = "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache"


def register() -> None:
    """Register the hooks for this process. Raises UnsupportedEngineError or SettingsError."""
    if VARIABLE not in os.environ:
        return
    is_api_server = multiprocessing.parent_process() is None
    if is_api_server:
        news = NewsReceiver()
        news.announce()
        _hook(API_SERVER, lambda *served, **options: _before_serving(news, *served, **options), "BEFORE")
    elif SCHEDULER not in sys.modules:
        return  # a process that does not schedule, such as the detokenizer
    check()
    if not is_api_server:
        from plait.backends.sglang.scheduler import (  # noqa: PLC0415 - only after the check
            PlannedSglangScheduler,
            scheduler_class,
        )

        PlannedSglangScheduler.plait_lacks = REQUIRED.missing_installed()
        _hook(f"{SCHEDULER}.Scheduler", scheduler_class(load(f"{SCHEDULER}.Scheduler")), "REPLACE")
        _hook(KV_CACHE, with_events, "AROUND")


def check() -> None:
    """Raise UnsupportedEngineError or SettingsError if the plugin cannot work in this SGLang or with its settings."""
    REQUIRED.installed_tier(read_settings().lowest_tier)


def _hook(target: str, hook: Any, kind: str) -> None:
    registry = load("sglang.srt.plugins.hook_registry.HookRegistry")
    registry.register(target, hook, getattr(load("sglang.srt.plugins.hook_registry.HookType"), kind))


def _before_serving(
    news: NewsReceiver,
    server_args: Any = None,
    tokenizer_manager: Any = None,
    template_manager: Any = None,
    *_others: Any,
    **_options: Any,
) -> None:
    """Add the routes. The parameters after `news` are those of SGLang's own function, which runs next."""
    from plait.backends.sglang.route import add_routes, obey_named_ranks  # noqa: PLC0415 - only the API server needs it
    from plait.backends.sglang.served_tokenizer import served_tokenizer  # noqa: PLC0415 - as above

    ranks = rank_count(server_args)
    add_routes(_problem(), news, partial(served_tokenizer, tokenizer_manager, template_manager), ranks)
    if ranks > 1:
        obey_named_ranks(tokenizer_manager, ranks)


def _problem() -> str | None:
    """Why the plugin cannot be active; None if it can."""
    try:
        check()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def with_events(build: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the KV cache record its events on every rank, even if SGLang publishes none."""
    return build(*args, **{**kwargs, "enable_kv_cache_events": True})
