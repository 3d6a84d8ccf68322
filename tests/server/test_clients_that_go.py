"""Clients that leave, or stop reading: their requests end, and memory stays bounded."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from fake_engine import FakeEngine, output_bytes

from tokentight.server.engine_api import GenerationRequest, SamplingParams

COMPLETIONS = "/v1/completions"


def send(port: int, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A raw client, which can do what HTTP libraries would not."""
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    payload = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    client.sendall(head.encode() + payload)
    return client


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_aborts_all_its_choices(serve: Any, stream: bool, n: int) -> None:
    """The engine holds its outputs back, so the requests can only end by being aborted."""
    engine = FakeEngine()
    engine.gate = threading.Event()
    service = serve(engine)
    try:
        client = send(service.port, {"prompt": "a", "max_tokens": 99, "stream": stream, "n": n})
        if stream:
            while b"data:" not in client.recv(65536):
                pass
        else:
            assert engine.made_free_tokens.wait(30)
        client.close()
        assert engine.idle.wait(30)
        assert engine.num_aborted == n
    finally:
        engine.gate.set()
    assert service.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
    assert 'finished_reason="abort",model_name="fake-model"} ' + f"{n}.0" in (
        service.client.get("/metrics").text
    )


def test_a_client_that_stops_reading_is_given_up(serve: Any) -> None:
    engine = FakeEngine(max_model_len=10**6)
    service = serve(engine, client_timeout_s=1.0)
    body = {"prompt": "a", "max_tokens": 900_000, "stream": True, "logprobs": 20}
    with send(service.port, body, receive_buffer=4096):
        assert engine.arrived.wait(30)
        assert engine.idle.wait(60)
        assert engine.num_aborted == 1
        assert engine.num_tokens_made < 900_000
    assert service.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_a_slow_client_gets_all_of_it_in_fewer_chunks(serve: Any) -> None:
    """While nobody reads, outputs are merged instead of queued, and nothing is lost."""
    engine = FakeEngine(max_model_len=30_000)
    service = serve(engine)
    number = 2_000
    body = {"prompt": [97], "max_tokens": number, "stream": True, "logprobs": 20}
    with send(service.port, body, receive_buffer=4096) as client:
        assert engine.arrived.wait(30)
        assert engine.idle.wait(60)  # all made, next to nothing read
        received = b""
        while b"[DONE]" not in received[-64:]:
            received += client.recv(1 << 20)
    chunks = [
        json.loads(line.split(b"data: ", 1)[1])
        for line in received.split(b"\n")
        if line.startswith(b"data: {")
    ]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    request = GenerationRequest("", (97,), SamplingParams())
    assert text == output_bytes(request, number).decode("utf-8", "replace")
    assert max(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) > 100


def test_a_body_that_stops_coming_is_answered_408(serve: Any) -> None:
    service = serve(FakeEngine(), client_timeout_s=0.5)
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            'Content-Length: 100\r\n\r\n{"prompt":'.encode()
        )
        answer = b""
        while received := client.recv(65536):
            answer += received
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"body_timeout"' in answer
