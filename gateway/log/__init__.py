"""The log: events as lines on stderr, which a server writes in the background."""

import sys

if not {"structlog", "rich"} & sys.modules.keys():
    # structlog would import rich, if it is installed, for tracebacks of its own: 4 MB of a server's memory.
    sys.modules["rich"] = None  # type: ignore[assignment]
    import structlog  # noqa: F401

    del sys.modules["rich"]
