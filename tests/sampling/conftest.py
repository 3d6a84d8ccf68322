"""A stand-in for the kernels, row by row, so that sampling is tested by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tokentight.pipeline.plan import SamplingPlan


class RowKernels:
    """The three row-wise operations sampling asks for, each row computed by itself."""

    name = "stand-in"
    device = torch.device("cpu")

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(logits.numpy().argmax(axis=1))

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.logsumexp(0) for row in logits])

    def softmax(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.softmax(0) for row in logits])


@pytest.fixture(scope="session")
def kernels() -> Any:
    return RowKernels()


PlanMaker = Callable[..., SamplingPlan]


@pytest.fixture(scope="session")
def make_plan() -> PlanMaker:
    """Builds a plan of one row for each given dict of parameters, greedy by default."""

    def make(*rows: dict[str, Any]) -> SamplingPlan:
        def column(name: str, default: float, dtype: type) -> Any:
            return np.array([row.get(name, default) for row in rows], dtype=dtype)

        biases = [row.get("logit_bias", {}) for row in rows]
        prompts = [list(row.get("prompt", ())) for row in rows]
        histories = [p + list(r.get("output", ())) for p, r in zip(prompts, rows, strict=True)]
        return SamplingPlan(
            token_indices=np.arange(len(rows), dtype=np.int32),
            temperature=column("temperature", 0.0, np.float32),
            top_k=column("top_k", 0, np.int32),
            top_p=column("top_p", 1.0, np.float32),
            min_p=column("min_p", 0.0, np.float32),
            repetition_penalty=column("repetition_penalty", 1.0, np.float32),
            presence_penalty=column("presence_penalty", 0.0, np.float32),
            frequency_penalty=column("frequency_penalty", 0.0, np.float32),
            seed=column("seed", 0, np.uint64),
            choice=column("choice", 0, np.int32),
            num_logprobs=column("num_logprobs", -1, np.int32),
            bias_starts=np.cumsum([0, *map(len, biases)]).astype(np.int32),
            bias_token_ids=np.array([t for b in biases for t in b], dtype=np.int32),
            bias_values=np.array([v for b in biases for v in b.values()], dtype=np.float32),
            history_starts=np.cumsum([0, *map(len, histories)]).astype(np.int32),
            history_token_ids=np.array([t for h in histories for t in h], dtype=np.int32),
            history_prompt_lens=np.array([len(p) for p in prompts], dtype=np.int32),
        )

    return make
