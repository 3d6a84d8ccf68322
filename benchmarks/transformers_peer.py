"""`transformers` as a peer: one workload, in a process of its own, offline (no HTTP).

Reads a workload as JSON from standard input and prints a measurement as JSON. `continuous` is the
library's own continuous batching; `padded` is `generate` on left-padded batches of at most the
workload's concurrency, which runs every request of a batch to the batch's longest output.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from workload import Workload, from_json

NO_TOKEN = -1
RESULT_TIMEOUT = 600


def continuous(model: AutoModelForCausalLM, workload: Workload) -> dict[str, object]:
    """Continuous batching; the library takes all requests at once and bounds the batch itself."""
    config = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, max_new_tokens=128)
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    try:
        _finish(manager, [manager.add_request([300] * 16, max_new_tokens=2)])
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


def padded(model: AutoModelForCausalLM, workload: Workload) -> dict[str, object]:
    """Left-padded batches, one after the other."""
    began = time.perf_counter()
    for start in range(0, len(workload.requests), workload.concurrency):
        batch = workload.requests[start : start + workload.concurrency]
        width = max(len(r.prompt) for r in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        longest = max(r.num_output_tokens for r in batch)
        config = GenerationConfig(
            do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0, max_new_tokens=longest
        )
        model.generate(ids, attention_mask=mask, generation_config=config)
    return {"seconds": time.perf_counter() - began, "timings": []}


def _finish(manager: object, names: list[str]) -> None:
    for _ in names:
        _next(manager)


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
    parser.add_argument("mode", choices=["continuous", "padded"])
    arguments = parser.parse_args()
    workload = from_json(sys.stdin.read())
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    measure = continuous if arguments.mode == "continuous" else padded
    with torch.inference_mode():
        print(json.dumps(measure(model, workload)))


if __name__ == "__main__":
    main()
