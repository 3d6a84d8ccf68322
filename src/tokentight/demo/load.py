"""The server's own word on how many requests it was computing at once."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tokentight.demo.server import HOST

INTERVAL = 0.05  # seconds
_RUNNING = re.compile(rb"^tokentight:num_requests_running(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(slots=True)
class PeakRunning:
    """The highest count seen so far."""

    value: int = 0


@contextlib.contextmanager
def peak_running(port: int) -> Iterator[PeakRunning]:
    """Watch the server's `num_requests_running` for as long as the block lasts."""
    peak, ended = PeakRunning(), threading.Event()

    def watch() -> None:
        while not ended.wait(INTERVAL):
            peak.value = max(peak.value, num_requests_running(port))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def num_requests_running(port: int) -> int:
    """The gauge as `/metrics` has it now; 0 where it cannot be read."""
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        found = _RUNNING.search(connection.getresponse().read())
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
    return int(float(found.group(1))) if found else 0
