"""A line for each request, in words or as JSON; never the text of a prompt."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
import warnings
from typing import Any

logger = logging.getLogger("kvcache.server")
MOST_LINES = 1000  # that wait to be written


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


class Writer(logging.Handler):
    """Writes lines to stderr in a thread of its own. Where nobody reads them, only this thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a signal may come while it is changed
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave a line to the thread, or drop it if too many wait."""
        if self._lines.qsize() < MOST_LINES:
            self._lines.put(self.format(record))

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(OSError):  # sys.stderr has a lock, for which the process would wait in the end
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else -1, f"{line}\n".encode(errors="replace"))

    def close(self) -> None:
        """Wait until lines are written, but not for long."""
        self._lines.put(None)
        self._thread.join(1)
        super().close()


def configure(is_json: bool) -> None:
    """Let all loggers, and warnings, write to stderr."""
    writer = Writer()
    if is_json:
        writer.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[writer], format="%(asctime)s %(levelname)s %(message)s", force=True)
    logger.setLevel(logging.INFO)
    warnings.showwarning = lambda message, *_: logger.warning("%s", message)
