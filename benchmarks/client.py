"""A closed-loop client of the streaming completions API, on the standard library.

It counts tokens itself (`return_token_ids`), so that neither chunks that carry several tokens nor
text held back by the server distort a number.
"""

from __future__ import annotations

import http.client
import itertools
import json
import queue
import threading
import time
from dataclasses import dataclass

from servers import SERVED_NAME
from workload import Request, Workload

TIMEOUT = 1200.0


class BenchmarkError(RuntimeError):
    """An engine answered with an error, or not with the tokens that were asked for."""


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """When a request was sent and when each of its tokens arrived, in seconds."""

    sent: float
    token_times: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_times:
            raise ValueError("a request without tokens has no timing")

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def inter_token_latencies(self) -> list[float]:
        """Gaps between tokens; one chunk's tokens share its gap evenly."""
        gaps: list[float] = []
        previous = self.token_times[0]
        for moment, tokens in itertools.groupby(self.token_times):
            if moment > previous:
                number = len(list(tokens))
                gaps.extend([(moment - previous) / number] * number)
                previous = moment
        return gaps


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload on one engine: wall time of the whole and the timing of each request."""

    seconds: float
    timings: tuple[RequestTiming, ...]


def measure(port: int, workload: Workload) -> Measurement:
    """Send the workload to the server on `port`.

    Raises:
        BenchmarkError: when any request fails or is answered with another number of tokens.
    """
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in workload.requests:
        waiting.put(request)
    timings: list[RequestTiming] = []
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                request = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                timings.append(stream(port, request))
            except (OSError, http.client.HTTPException, ValueError, BenchmarkError) as error:
                errors.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workload.concurrency)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise BenchmarkError(f"a request failed: {errors[0]!r}") from errors[0]
    return Measurement(seconds, tuple(timings))


def stream(port: int, request: Request) -> RequestTiming:
    """Send one request and time its tokens."""
    body = {
        "model": SERVED_NAME,
        "prompt": list(request.prompt),
        "max_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        sent = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise BenchmarkError(f"HTTP {response.status}: {response.read(500)!r}")
        token_times: list[float] = []
        for line in response:
            moment = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise BenchmarkError(f"the stream ended with an error: {event['error']}")
            for choice in event["choices"]:
                token_times.extend([moment] * len(choice.get("token_ids") or ()))
    finally:
        connection.close()
    if len(token_times) != request.num_output_tokens:
        raise BenchmarkError(
            f"{len(token_times)} tokens came where {request.num_output_tokens} were asked for"
        )
    return RequestTiming(sent, tuple(token_times))
