"""A pipeline whose arithmetic is a hash chain instead of a transformer.

The KV slot of a token holds a digest of everything the token could attend to: the slot before it
as read through the block table, its own id and its position. A token swallowed, doubled, misplaced
or read from another request's block changes every digest after it, and so every sampled token. It
stands in for the stages (the codec included) so that bookkeeping can be tested in its thousands.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable

import numpy as np

from tokentight.pipeline import codec
from tokentight.pipeline.interface import PipelineEvent, StageLost
from tokentight.pipeline.plan import NO_LOGPROBS, Logprobs, StepPlan, StepResult

VOCAB_SIZE = 97
START = b"\0" * 8


def link(before: bytes, token_id: int, position: int) -> bytes:
    """What the KV holds for a token."""
    packed = before + struct.pack("<qq", token_id, position)
    return hashlib.blake2b(packed, digest_size=8).digest()


def token_of(state: bytes, seed: int, choice: int) -> int:
    """The token "sampled" after `state`."""
    digest = hashlib.blake2b(state + struct.pack("<Qq", seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def logprob_of(state: bytes, token_id: int) -> float:
    """The logprob of a token after `state`; always exactly representable in float32."""
    return -float(int.from_bytes(link(state, token_id, -1)[:2], "little")) / 1024


class SymbolicPipeline:
    """Answers plans in order. `losing(n)` says whether the n-th event is the loss of a stage."""

    kernels_name = "symbolic"
    promise_holds = True

    def __init__(
        self,
        num_stages: int,
        num_blocks: int,
        block_size: int,
        losing: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.num_stages = num_stages
        self.plans: list[StepPlan] = []
        self._block_size = block_size
        self._kv = [b"never written"] * (num_blocks * block_size)
        self._submitted: deque[bytes] = deque()
        self._losing = losing
        self._num_events = 0
        self._epoch = 0

    def submit(self, plan: StepPlan) -> bytes:
        assert plan.epoch == self._epoch, "a plan of an epoch that is over"
        encoded = codec.encode(plan)
        self._submitted.append(encoded)
        self.plans.append(plan)
        return codec.digest_of(encoded)

    def next_event(self, timeout_s: float | None) -> PipelineEvent | None:
        assert self._submitted, "the driver waits for an answer to nothing"
        self._num_events += 1
        if self._losing(self._num_events):
            return StageLost(0, "lost on purpose")
        encoded = self._submitted.popleft()
        return self._execute(codec.decode_plan(encoded), codec.digest_of(encoded))

    def wake(self) -> None:
        pass

    def recover(self, epoch: int) -> None:
        assert epoch > self._epoch
        self._epoch = epoch
        self._submitted.clear()
        self._kv = [f"lost with epoch {epoch}".encode()] * len(self._kv)

    def give_up_recovery(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _execute(self, plan: StepPlan, digest: bytes) -> StepResult:
        size = self._block_size
        states: list[bytes] = []
        for row in range(plan.num_rows):
            table = plan.block_tables[row]
            for index in range(plan.query_starts[row], plan.query_starts[row + 1]):
                position = int(plan.positions[index])
                before = START
                if position > 0:
                    previous = position - 1
                    before = self._kv[table[previous // size] * size + previous % size]
                state = link(before, int(plan.token_ids[index]), position)
                self._kv[int(plan.slots[index])] = state
                states.append(state)
        sampling = plan.sampling
        sampled = [
            token_of(states[index], int(seed), int(choice))
            for index, seed, choice in zip(
                sampling.token_indices, sampling.seed, sampling.choice, strict=True
            )
        ]
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            digest=digest,
            sampled_token_ids=np.array(sampled, np.int32),
            sampled=_logprobs(
                [states[i] for i in sampling.token_indices], sampled, sampling.num_logprobs
            ),
            scored=_logprobs(
                [states[i] for i in plan.scored_token_indices],
                plan.scored_targets.tolist(),
                plan.scored_num_logprobs,
            ),
        )


def _logprobs(states: list[bytes], token_ids: list[int], wanted: np.ndarray) -> Logprobs:
    width = max([0, *wanted.tolist()])
    values = [
        0.0 if count == NO_LOGPROBS else logprob_of(state, token_id)
        for state, token_id, count in zip(states, token_ids, wanted, strict=True)
    ]
    return Logprobs(
        logprob=np.array(values, np.float32),
        rank=np.ones(len(states), np.int32),
        top_token_ids=np.zeros((len(states), width), np.int32),
        top_logprobs=np.zeros((len(states), width), np.float32),
    )
