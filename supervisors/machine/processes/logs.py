"""What each of our processes sets up first: an event loop, and logs as JSON lines, an object for each event."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import structlog

from actors.host.bounded_file import BoundedFile
from configs.limits import DEFAULT_LIMITS


def new_loop() -> asyncio.AbstractEventLoop:
    """A new event loop: uvloop's where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def log_to_file(path: Path) -> None:
    """Log to ``path``, so that the terminal stays free for progress; no log call fails when the disk is full."""
    file: Any = BoundedFile(path, DEFAULT_LIMITS.process_log_max_bytes)
    _configure(structlog.WriteLoggerFactory(file=file), cache=False)


def log_to_stderr(process: str) -> None:
    """Log to stderr, each event with the process's name; the parent keeps the file."""
    _configure(structlog.PrintLoggerFactory(sys.stderr), cache=True)
    structlog.contextvars.bind_contextvars(process=process, pid=os.getpid())
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)


def _configure(factory: Any, *, cache: bool) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=factory,
        cache_logger_on_first_use=cache,
    )
