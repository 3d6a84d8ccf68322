"""The id of the request being answered, in every log line written on its behalf."""

from __future__ import annotations

import logging
from contextvars import ContextVar

current_request_id: ContextVar[str] = ContextVar("current_request_id", default="-")

LOG_FORMAT = "%(asctime)s %(levelname)s [%(request_id)s] %(name)s: %(message)s"


class RequestIdFilter(logging.Filter):
    """Gives records the field `request_id`. Belongs on handlers, so that every logger's pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = current_request_id.get()
        return True


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the log of this process to stderr, each line with its request's id."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    handler.addFilter(RequestIdFilter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its comings and goings are told here
