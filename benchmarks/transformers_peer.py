"""`transformers` as a peer: one workload, in a process of its own, offline (no HTTP).

Reads a workload as JSON from standard input and prints a measurement as JSON. Requests one at a
time go through plain `generate`, which is faster for that; others through the library's own
continuous batching.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import BaseStreamer

from workload import Workload, from_json

NO_TOKEN = -1
RESULT_TIMEOUT = 600


def continuous(model: AutoModelForCausalLM, workload: Workload) -> dict[str, object]:
    """Continuous batching, with as many requests open as the workload allows."""
    config = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, max_new_tokens=128)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        manager.add_request([300] * 16, max_new_tokens=2)
        _next(manager)  # what the first request waits for is no part of the measurement
        waiting = list(workload.requests)[::-1]
        timings: list[list[float]] = []
        sent: dict[str, float] = {}
        began = time.perf_counter()
        while waiting or sent:
            while waiting and len(sent) < workload.concurrency:
                request = waiting.pop()
                name = manager.add_request(
                    list(request.prompt),
                    max_new_tokens=request.num_output_tokens,
                    record_timestamps=True,
                )
                sent[name] = time.perf_counter()
            result = _next(manager)
            timings.append([sent.pop(result.request_id), *result.timestamps])
        seconds = time.perf_counter() - began
    finally:
        manager.stop(block=True)
    return {"seconds": seconds, "timings": timings}


class TokenClock(BaseStreamer):
    """Notes when each token comes out of `generate`, which first puts the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def one_by_one(model: AutoModelForCausalLM, workload: Workload) -> dict[str, object]:
    """Plain `generate`, one request after the other."""
    timings: list[list[float]] = []
    began = time.perf_counter()
    for request in workload.requests:
        config = GenerationConfig(
            do_sample=False, pad_token_id=0, max_new_tokens=request.num_output_tokens
        )
        ids = torch.tensor([request.prompt])
        clock, sent = TokenClock(), time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=clock
        )
        timings.append([sent, *clock.times[1:]])
    return {"seconds": time.perf_counter() - began, "timings": timings}


def _next(manager: object) -> object:
    while True:
        result = manager.get_result(timeout=RESULT_TIMEOUT)
        if result is None:
            raise RuntimeError(f"no answer within {RESULT_TIMEOUT} s")
        if result.error:
            raise RuntimeError(result.error)
        if result.is_finished():
            return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    arguments = parser.parse_args()
    workload = from_json(sys.stdin.read())
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    measure = one_by_one if workload.concurrency == 1 else continuous
    with torch.inference_mode():
        print(json.dumps(measure(model, workload)))


if __name__ == "__main__":
    main()
