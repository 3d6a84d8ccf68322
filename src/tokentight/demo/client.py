"""Ask the questions over HTTP, on the standard library, and keep what must be equal."""

from __future__ import annotations

import http.client
import json
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from tokentight.demo.load import peak_running
from tokentight.demo.questions import Question
from tokentight.demo.server import HOST

REQUEST_TIMEOUT = 600.0


class RequestError(RuntimeError):
    """A question that the server did not answer; names the question and what came instead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered. `logprob_bits` are the chosen tokens' logprobs and their rivals'
    as the bytes of doubles: equality is of bits, not of printed digits."""

    text: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprob_bits: bytes


@dataclass(frozen=True, slots=True)
class Pass:
    """All questions asked once, at most `concurrency` at a time; answers in question order.

    `peak_running` is the most requests that the server was seen computing at once.
    """

    concurrency: int
    peak_running: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


def ask_all(
    port: int,
    model: str,
    asked: Sequence[Question],
    concurrency: int,
    on_answer: Callable[[], None],
) -> Pass:
    """Ask every question, `on_answer` after each.

    The pass has a cache salt of its own: within it prompts share their cached prefixes, but
    nothing is taken over from an earlier pass, which would leave nothing to compute.

    Raises:
        RequestError: for the first question that is not answered.
    """
    salt = f"demo-{concurrency}"
    pool = ThreadPoolExecutor(max_workers=concurrency)
    with peak_running(port) as peak:
        began = time.perf_counter()
        try:
            futures = [pool.submit(ask, port, model, question, salt) for question in asked]
            for future in as_completed(futures):
                future.result()
                on_answer()
        finally:
            # Not waited for when interrupted: ending the server ends what is still open.
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.perf_counter() - began
    return Pass(concurrency, peak.value, seconds, tuple(future.result() for future in futures))


def ask(port: int, model: str, question: Question, cache_salt: str) -> Answer:
    """Ask one question.

    Raises:
        RequestError: when the server cannot be reached or answers with an error.
    """
    body = {"model": model, "return_token_ids": True, "cache_salt": cache_salt, **question.body}
    connection = http.client.HTTPConnection(HOST, port, timeout=REQUEST_TIMEOUT)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", question.path, json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"{question.title!r}: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        reason = content.decode(errors="replace")[:500]
        raise RequestError(f"{question.title!r}: HTTP {response.status}: {reason}")
    return _read(json.loads(content))


def _read(document: Any) -> Answer:
    choice = document["choices"][0]
    if "message" in choice:
        text, prompt = choice["message"]["content"], document["prompt_token_ids"]
        values = [value for token in choice["logprobs"]["content"] for value in _with_rivals(token)]
    else:
        text, prompt = choice["text"], choice["prompt_token_ids"]
        values = list(choice["logprobs"]["token_logprobs"])
        for rivals in choice["logprobs"]["top_logprobs"]:
            values.extend(rivals.values())
    return Answer(
        text=text,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(choice["token_ids"]),
        logprob_bits=struct.pack(f"<{len(values)}d", *values),
    )


def _with_rivals(token: Any) -> list[float]:
    return [token["logprob"], *(rival["logprob"] for rival in token["top_logprobs"])]
