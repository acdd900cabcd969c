"""Imports transformers late: it takes half a second, and processes without a tokenizer do not need it."""

from __future__ import annotations

import logging


def import_transformers() -> None:
    """Import transformers and suppress its advice to install PyTorch, which tokenizers do not need."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("PyTorch was not found")

    logger = logging.getLogger("transformers")
    logger.addFilter(is_no_advice)
    try:
        import transformers  # noqa: F401, PLC0415
    finally:
        logger.removeFilter(is_no_advice)
