"""The demo tells equal answers from different ones, over real HTTP."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from tokentight.demo.client import Answer, RequestError, ask_all
from tokentight.demo.comparison import Comparison, compare, differing_parts
from tokentight.demo.load import num_requests_running
from tokentight.demo.questions import questions
from tokentight.demo.terminal import show

NUMBER = 8


class StubServer(ThreadingHTTPServer):
    """Answers from the request alone, but for the damage it is told to do to some pass."""

    request_queue_size = 128

    def __init__(self, damage: str | None) -> None:
        super().__init__(("127.0.0.1", 0), StubHandler)
        self.damage = damage
        self.bodies: list[dict[str, object]] = []


class StubHandler(BaseHTTPRequestHandler):
    server: StubServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        loaded = body["cache_salt"] == f"demo-{NUMBER}"
        hit = loaded and body.get("seed") == 1
        if hit and self.server.damage == "error":
            self.send_error(500, "broken")
            return
        token_ids = [5, 6 + (hit and self.server.damage == "token")]
        logprob = -0.5 - 2e-17 if not hit or self.server.damage != "bit" else -0.5000000000000001
        rivals = [{"token": "a", "logprob": logprob}, {"token": "b", "logprob": -2.25}]
        if self.path == "/v1/chat/completions":
            content = [{"token": "a", "logprob": logprob, "top_logprobs": rivals}]
            choice = {"message": {"content": "one"}, "logprobs": {"content": content}}
            document = {"prompt_token_ids": [1, 2], "choices": [choice]}
        else:
            logprobs = {"token_logprobs": [logprob], "top_logprobs": [{"a": logprob, "b": -2.25}]}
            choice = {"text": "one", "logprobs": logprobs, "prompt_token_ids": [1, 2]}
            document = {"choices": [choice]}
        choice["token_ids"] = token_ids
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        content = b'# HELP x\ntokentight:num_requests_running{model_name="stub"} 3.0\n'
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def stub(damage: str | None) -> Iterator[StubServer]:
    server = StubServer(damage)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_twice(server: StubServer) -> Comparison:
    asked, port = questions(NUMBER), server.server_address[1]
    quiet = ask_all(port, "demo", asked, 1, lambda: None)
    loaded = ask_all(port, "demo", asked, NUMBER, lambda: None)
    return compare("stub", 2, asked, quiet, loaded)


def rendered(comparison: Comparison) -> str:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as capture:
        show(comparison, console)
    return capture.get()


def test_equal_answers_are_found_equal() -> None:
    with stub(None) as server:
        comparison = ask_twice(server)
    assert comparison.differences == ()
    assert comparison.to_json()["identical"] == NUMBER
    assert f"{NUMBER} of {NUMBER} answers are the same" in rendered(comparison)


@pytest.mark.parametrize(("damage", "what"), [("token", "token ids"), ("bit", "logprobs")])
def test_one_token_or_the_last_bit_of_one_logprob_is_found(damage: str, what: str) -> None:
    """Questions 2 and 3 have seed 1, and are the ones damaged under load."""
    with stub(damage) as server:
        comparison = ask_twice(server)
    assert [(d.index, d.what) for d in comparison.differences] == [(2, (what,)), (3, (what,))]
    text = rendered(comparison)
    assert f"2 of {NUMBER} answers differ" in text
    assert comparison.differences[0].title in text


def test_an_error_is_reported_and_never_read_as_a_difference() -> None:
    with stub("error") as server, pytest.raises(RequestError, match="HTTP 500"):
        ask_twice(server)


def test_each_pass_has_a_cache_salt_of_its_own() -> None:
    """Else the loaded pass would find its prompts in the cache and compute nothing."""
    with stub(None) as server:
        ask_twice(server)
    salts = [body["cache_salt"] for body in server.bodies]
    assert salts == ["demo-1"] * NUMBER + [f"demo-{NUMBER}"] * NUMBER


def test_the_servers_own_count_of_running_requests_is_read() -> None:
    with stub(None) as server:
        port = server.server_address[1]
        assert num_requests_running(port) == 3
    assert num_requests_running(port) == 0


def test_minus_zero_differs_from_zero() -> None:
    """Bits are compared, not numbers."""
    zero, minus_zero = bytes(8), bytes(7) + b"\x80"
    quiet, loaded = (Answer("", (), (), bits) for bits in (zero, minus_zero))
    assert differing_parts(quiet, loaded) == ("logprobs",)


def test_the_questions_are_always_the_same_and_mix_what_they_should() -> None:
    asked = questions(64)
    assert asked == questions(64)
    assert {q.path for q in asked} == {"/v1/chat/completions", "/v1/completions"}
    assert {q.body["temperature"] for q in asked} == {0, 0.8}
    assert all("seed" in q.body for q in asked if q.body["temperature"])
    assert len({(q.title, json.dumps(q.body)) for q in asked}) == 64
