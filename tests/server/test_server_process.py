"""The server as a process: its ready line, its exit codes, and how it stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).with_name("fake_server.py")


class ServerProcess:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
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
def process(*command: str, **environment: str) -> Iterator[ServerProcess]:
    server = ServerProcess(command, environment)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@contextlib.contextmanager
def server_process(
    port: int = 0, drain_s: float = 300, broken: bool = False
) -> Iterator[ServerProcess]:
    arguments = (str(port), str(drain_s), *["broken"] * broken)
    with process(str(SCRIPT), *arguments, PYTHONPATH=os.pathsep.join(sys.path)) as server:
        yield server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(number: signal.Signals) -> None:
    """The open stream is finished whole; new requests are refused, on a connection that closes."""
    body = {"prompt": "a", "max_tokens": 60, "stream": True}
    with server_process() as server, httpx.Client(timeout=60) as client:
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
    with server_process() as server:
        server.wait_until_ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    """The open stream would go on for half an hour."""
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with server_process() as server, httpx.Client(timeout=60) as client:
        url = server.wait_until_ready()
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            next(response.iter_lines())
            server.process.send_signal(signal.SIGTERM)
            server.line_with("stopping")
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=60) == 130


def test_what_does_not_finish_in_time_is_ended_with_an_error() -> None:
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True}
    with server_process(drain_s=0.2) as server, httpx.Client(timeout=60) as client:
        url = server.wait_until_ready()
        with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert (
            "the engine was shut down"
            in json.loads(last.removeprefix("data: "))["error"]["message"]
        )
        assert server.process.wait(timeout=60) == 0


def test_a_port_in_use_is_said_and_exits_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server_process(port) as server:
            assert f"cannot listen on 127.0.0.1 port {port}" in server.line_with("--port")
            assert server.process.wait(timeout=60) == 1


def test_an_engine_that_does_not_start_is_said_and_exits_1() -> None:
    with server_process(broken=True) as server:
        assert "the model needs 9 GiB, 2 GiB are free" in server.line_with("did not start")
        assert server.process.wait(timeout=60) == 1


def test_the_command_serves_a_model(tiny_model: Path) -> None:
    """The real thing: `tokentight serve`, its model loaded, a key from the environment."""
    options = ("--port", "0", "--served-model-name", "tiny", "--max-model-len", "128")
    command = ("-m", "tokentight", "serve", str(tiny_model), *options, "--kv-cache-memory", "4MiB")
    paths = os.pathsep.join(sys.path)
    with process(*command, TOKENTIGHT_API_KEY="sesame", PYTHONPATH=paths) as server:
        url = server.wait_until_ready()
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer sesame"}
        response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert response.json()["usage"]["completion_tokens"] == 3
        assert (
            httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["max_model_len"] == 128
        )
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "int3"), "int3"),
        (("--port", "70000"), "70000"),
        (("--kv-cache-memory", "lots"), "lots"),
        (("--block-size", "7"), "block_size"),
    ],
)
def test_a_mistake_in_the_command_line_is_named_and_exits_64(
    options: tuple[str, str], said: str
) -> None:
    command = ("-m", "tokentight", "serve", "some-model", *options)
    with process(*command, PYTHONPATH=os.pathsep.join(sys.path), COLUMNS="200") as server:
        server.line_with(said)
        assert server.process.wait(timeout=60) == 64
