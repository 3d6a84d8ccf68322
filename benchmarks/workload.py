"""The requests of a run: random-token prompts, the same for every engine."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

PROMPT_TOKENS = (128, 384)
OUTPUT_TOKENS = (32, 96)
FIRST_ORDINARY_TOKEN = 256  # below lie special and single-byte tokens


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and how many tokens must be generated for it (end-of-text is ignored)."""

    prompt: tuple[int, ...]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are sent in order, at most `concurrency` of them open at a time."""

    concurrency: int
    requests: tuple[Request, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)


def num_requests(concurrency: int) -> int:
    """As many as the concurrency, but 3 at 1 and 16 at 8, so that a run is not too short."""
    return {1: 3, 8: 16}.get(concurrency, concurrency)


def make_workload(concurrency: int, run: int, vocab_size: int) -> Workload:
    """The workload of one run. Each run has prompts of its own: no engine finds them cached.

    Lengths are drawn before tokens and depend on the concurrency alone, so that every run of a
    concurrency does the same amount of work.
    """
    lengths = random.Random(concurrency)
    tokens = random.Random(1_000_003 * (run + 1) + concurrency)
    requests = []
    for _ in range(num_requests(concurrency)):
        num_prompt, num_output = lengths.randint(*PROMPT_TOKENS), lengths.randint(*OUTPUT_TOKENS)
        prompt = tuple(
            tokens.randrange(FIRST_ORDINARY_TOKEN, vocab_size) for _ in range(num_prompt)
        )
        requests.append(Request(prompt, num_output))
    return Workload(concurrency, tuple(requests))


def to_json(workload: Workload) -> str:
    """For a process that runs the workload by itself."""
    requests = [[list(r.prompt), r.num_output_tokens] for r in workload.requests]
    return json.dumps({"concurrency": workload.concurrency, "requests": requests})


def from_json(text: str) -> Workload:
    """What `to_json` wrote."""
    document = json.loads(text)
    requests = tuple(Request(tuple(prompt), number) for prompt, number in document["requests"])
    return Workload(document["concurrency"], requests)
