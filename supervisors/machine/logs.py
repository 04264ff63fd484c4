"""Logs of the head: JSON lines in a file, so that the terminal stays free for progress."""

from __future__ import annotations

import logging
from pathlib import Path

import structlog


def configure_head_logging(path: Path) -> None:
    """Send structlog's events of this process to ``path``, appended, as one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(file=path.open("a", encoding="utf-8", buffering=1)),
        cache_logger_on_first_use=False,
    )
