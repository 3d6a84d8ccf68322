"""A server as a child process: started, waited for, ended with whatever it started."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
LOG_TAIL_LINES = 20
GRACE = 15.0  # seconds between SIGTERM and SIGKILL
INTERRUPTED_GRACE = 3.0


class ServerError(RuntimeError):
    """A server that ended before it was ready, or was not ready in time; with its last output."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a running server listens, and how long it took to be ready (seconds)."""

    port: int
    pid: int
    startup_seconds: float


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    port: int,
    *,
    ready_path: str,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """Run `command` until the block ends; enter it once `ready_path` on `port` answers 200.

    The server gets a process group of its own: SIGTERM on leaving, SIGKILL to the whole group
    for what is left after a while, which is short when the block was left by an exception.

    Raises:
        ServerError: with the last lines of the server's output.
    """
    with tempfile.TemporaryDirectory(prefix="tokentight-") as scratch:
        log = Path(scratch) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            seconds = _wait_until_ready(process, port, ready_path, timeout, log)
            yield Server(port, process.pid, seconds)
        except BaseException:
            _end(process, INTERRUPTED_GRACE)
            raise
        _end(process, GRACE)


def _wait_until_ready(
    process: subprocess.Popen[bytes], port: int, path: str, timeout: float, log: Path
) -> float:
    began = time.monotonic()
    while not _answers(port, path):
        if process.poll() is not None:
            raise ServerError(f"the server ended with code {process.returncode}:\n{_tail(log)}")
        if time.monotonic() - began > timeout:
            raise ServerError(f"the server was not ready within {timeout:.0f} s:\n{_tail(log)}")
        time.sleep(0.1)
    return time.monotonic() - began


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
