"""The server as a process: its ready line, its exit codes, and how it stops."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("fake_server.py")


class ServerProcess:
    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], stderr=subprocess.PIPE, text=True
        )

    def line_with(self, words: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if words in line:
                return line
        raise AssertionError(f"the server ended without saying {words!r}")

    def wait_until_ready(self) -> str:
        match = re.search(r"http://\S+", self.line_with("ready:"))
        assert match is not None
        return match.group(0)


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(number: signal.Signals) -> None:
    """The open stream is finished whole; new requests are refused, on a connection that closes."""
    body = {"prompt": "a", "max_tokens": 60, "stream": True}
    with server_process("0") as server, httpx.Client(timeout=60) as client:
        url = server.wait_until_ready()
        assert client.get(f"{url}/ready").status_code == 200
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.process.send_signal(number)
            server.line_with("stopping")
            refused = httpx.post(f"{url}/v1/completions", json={"prompt": "b"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_draining"
            assert refused.headers["connection"] == "close"
            assert httpx.get(f"{url}/ready").status_code == 503
            assert httpx.get(f"{url}/health").status_code == 200
            received = [line for line in [first, *lines] if line]
        assert received.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in received]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=60) == 0


def test_an_idle_server_exits_0_at_once() -> None:
    with server_process("0") as server:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    """The open stream would go on for half an hour."""
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with server_process("0") as server, httpx.Client(timeout=60) as client:
        url = server.wait_until_ready()
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            server.line_with("stopping")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 130


def test_a_port_in_use_is_said_and_exits_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server_process(str(port)) as server:
            assert f"cannot listen on 127.0.0.1 port {port}" in server.line_with("--port")
            assert server.process.wait(timeout=60) == 1


def test_an_engine_that_does_not_start_is_said_and_exits_1() -> None:
    with server_process("0", "broken") as server:
        assert "the model needs 9 GiB, 2 GiB are free" in server.line_with("did not start")
        assert server.process.wait(timeout=60) == 1
