"""A line for each request, in words or as JSON; never the text of a prompt."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

logger = logging.getLogger("kvcache.server")


def log_request(**facts: Any) -> None:
    """Write a line of what is known of a request."""
    logger.info("request %s", " ".join(f"{name}={value}" for name, value in facts.items()), extra={"facts": facts})


class JsonFormatter(logging.Formatter):
    """Makes a line an object of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time_of = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        facts = getattr(record, "facts", None) or {"message": record.getMessage()}
        if record.exc_info:
            facts = {**facts, "error": self.formatException(record.exc_info)}
        return json.dumps({"time": time_of, "level": record.levelname.lower(), **facts})


def configuration(is_json: bool) -> dict[str, Any]:
    """Return what the loggers of the server and of uvicorn write to stderr."""
    plain = {"format": "%(asctime)s %(levelname)s %(message)s"}
    form: dict[str, Any] = {"()": "kvcache.server.log.JsonFormatter"} if is_json else plain
    handler = {"class": "logging.StreamHandler", "formatter": "lines", "stream": "ext://sys.stderr"}
    levels = {"uvicorn": "WARNING", "asyncio": "WARNING", "kvcache": "WARNING", "kvcache.server": "INFO"}
    loggers = {name: {"handlers": ["stderr"], "level": level, "propagate": False} for name, level in levels.items()}
    return {
        "version": 1, "disable_existing_loggers": False, "formatters": {"lines": form}, "handlers": {"stderr": handler},
        "loggers": loggers,
    }  # fmt: skip
