"""Random plans and results: shapes that fit together, contents of any kind."""

from __future__ import annotations

import numpy as np

from tokentight.pipeline.plan import Logprobs, SamplingPlan, StepPlan, StepResult


def a_plan(seed: int, num_rows: int, max_tokens: int) -> StepPlan:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, max_tokens + 1, num_rows)
    num_tokens = int(counts.sum())
    num_sampled = int(rng.integers(0, num_rows + 1))
    num_scored = int(rng.integers(0, num_tokens + 1))

    def ints(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def starts() -> np.ndarray:
        return np.cumsum([0, *rng.integers(0, 4, num_sampled)], dtype=np.int32)

    bias_starts, history_starts = starts(), starts()
    return StepPlan(
        step=int(rng.integers(0, 2**62)),
        epoch=int(rng.integers(0, 9)),
        token_ids=ints(num_tokens),
        positions=ints(num_tokens),
        slots=rng.integers(0, 2**40, num_tokens, dtype=np.int64),
        request_numbers=rng.integers(0, 2**62, num_rows, dtype=np.int64),
        query_starts=np.cumsum([0, *counts], dtype=np.int32),
        context_lens=ints(num_rows),
        block_tables=ints(num_rows, int(rng.integers(1, 5))),
        scored_token_indices=ints(num_scored),
        scored_targets=ints(num_scored),
        scored_num_logprobs=ints(num_scored),
        sampling=SamplingPlan(
            token_indices=ints(num_sampled),
            temperature=floats(num_sampled),
            top_k=ints(num_sampled),
            top_p=floats(num_sampled),
            min_p=floats(num_sampled),
            repetition_penalty=floats(num_sampled),
            presence_penalty=floats(num_sampled),
            frequency_penalty=floats(num_sampled),
            seed=rng.integers(0, 2**64, num_sampled, dtype=np.uint64),
            choice=ints(num_sampled),
            num_logprobs=ints(num_sampled),
            bias_starts=bias_starts,
            bias_token_ids=ints(int(bias_starts[-1])),
            bias_values=floats(int(bias_starts[-1])),
            history_starts=history_starts,
            history_token_ids=ints(int(history_starts[-1])),
            history_prompt_lens=ints(num_sampled),
        ),
    )


def a_result(seed: int, num_sampled: int, num_scored: int) -> StepResult:
    rng = np.random.default_rng(seed)

    def logprobs(count: int) -> Logprobs:
        width = int(rng.integers(0, 4))
        return Logprobs(
            logprob=rng.standard_normal(count, dtype=np.float32),
            rank=rng.integers(1, 100, count, dtype=np.int32),
            top_token_ids=rng.integers(0, 100, (count, width), dtype=np.int32),
            top_logprobs=rng.standard_normal((count, width), dtype=np.float32),
        )

    return StepResult(
        step=seed,
        epoch=1,
        digest=rng.bytes(32),
        sampled_token_ids=rng.integers(0, 100, num_sampled, dtype=np.int32),
        sampled=logprobs(num_sampled),
        scored=logprobs(num_scored),
    )
