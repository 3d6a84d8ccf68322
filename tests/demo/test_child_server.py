"""A server as a child process is ready when entered and gone, with its children, when left."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from pathlib import Path

import pytest

from tokentight.demo.server import ServerError, free_port, running_server

SERVER = """
import os, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                         stdin=subprocess.PIPE)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
with open(sys.argv[2], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def has_ended(pid: int) -> bool:
    """Whether `pid` has ended, or does within ten seconds of being killed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


def test_it_and_its_children_are_ended_on_leaving_even_by_an_error(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    command = [sys.executable, "-c", SERVER, str(port), str(pids)]
    with contextlib.suppress(KeyboardInterrupt):
        with running_server(command, port, ready_path="/ready", timeout=60) as server:
            processes = [int(pid) for pid in pids.read_text().split()]
            assert processes[0] == server.pid
            for process in processes:
                os.kill(process, 0)
            raise KeyboardInterrupt
        pytest.fail("the interrupt was swallowed")
    assert all(map(has_ended, processes))


def test_one_that_ends_early_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with (
        pytest.raises(ServerError, match=r"ended with code 3:\nno such model"),
        running_server(command, free_port(), ready_path="/ready", timeout=60),
    ):
        pytest.fail("entered")


def test_one_that_never_gets_ready_is_ended(tmp_path: Path) -> None:
    port, pids = free_port(), tmp_path / "pids"
    command = [sys.executable, "-c", SERVER, str(port), str(pids)]
    with (
        pytest.raises(ServerError, match="not ready within 3 s"),
        running_server(command, port, ready_path="/other", timeout=3),
    ):
        pytest.fail("entered")
    if pids.exists():
        assert all(has_ended(int(pid)) for pid in pids.read_text().split())
