"""Logs for people (text) or machines (one JSON object a line), on standard error."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        return json.dumps(
            {**line, "message": record.getMessage(), **_facts(record), **self._error(record)}, default=str
        )

    def _error(self, record: logging.LogRecord) -> dict[str, str]:
        return {"error": self.formatException(record.exc_info)} if record.exc_info else {}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = " ".join(f"{name}={_shown(value)}" for name, value in _facts(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()} {facts}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logs(log_format: str, level: str) -> None:
    """Configure logging of this process: log records, warnings and uncaught errors of threads, in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel("ERROR" if level == "error" else "WARNING")
    logging.getLogger("hybridkv").setLevel(level.upper())
    logging.getLogger("uvicorn").setLevel("INFO" if level == "debug" else root.level)
    theirs = logging.getLogger("transformers")  # has a handler of its own
    theirs.handlers.clear()
    theirs.propagate = True
    logging.captureWarnings(True)
    threading.excepthook = _log_failed_thread


def _log_failed_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        name = failed.thread.name if failed.thread is not None else "unknown"
        logging.getLogger("hybridkv").error("thread %s has failed", name, exc_info=failed.exc_value)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts: dict[str, Any] = record.__dict__.get("facts", {})
    return facts


def _shown(value: object) -> str:
    """The value, quoted if it could be mistaken for several values or for another line."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
