"""A stage of the pipeline: weights and KV blocks, and nothing about requests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokentight.kernels.interface import Kernels, StepInputs
from tokentight.models.decoder import DecoderStage
from tokentight.pipeline.plan import I32, Logprobs, StepPlan, StepResult
from tokentight.sampling.logprobs import score
from tokentight.sampling.rows import slice_sampling
from tokentight.sampling.sampler import sample_valid_rows

logger = logging.getLogger(__name__)

HEAD_ROWS = 128
"""Rows of logits held at once; bounds the memory of long prompts with prompt logprobs."""


class Stage:
    """Runs one plan at a time through this stage's layers.

    `execute` is a pure function of the plan, the hidden states and the KV blocks the plan names;
    no plan leaves anything behind but what it wrote to its own KV slots.
    """

    def __init__(self, decoder: DecoderStage, kernels: Kernels, block_size: int) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._block_size = block_size

    def execute(self, plan: StepPlan, hidden: Tensor | None) -> Tensor:
        """The hidden states for the next stage, float32 `[T, H]`; `hidden` is None at the first."""
        with torch.inference_mode():
            return self._decoder.forward(self._inputs(plan), hidden)

    def answer(self, plan: StepPlan, hidden: Tensor, digest: bytes) -> StepResult:
        """The last stage's work after `execute`: logits, tokens and logprobs."""
        with torch.inference_mode():
            token_ids, sampled = self._sample(plan, hidden)
            scored = self._score(plan, hidden)
        return StepResult(
            step=plan.step,
            epoch=plan.epoch,
            digest=digest,
            sampled_token_ids=token_ids,
            sampled=sampled,
            scored=scored,
        )

    def _inputs(self, plan: StepPlan) -> StepInputs:
        device = self._kernels.device
        return StepInputs(
            token_ids=torch.tensor(plan.token_ids, device=device),
            positions=torch.tensor(plan.positions, device=device),
            slots=torch.tensor(plan.slots, device=device),
            query_starts=torch.tensor(plan.query_starts, device=device),
            context_lens=torch.tensor(plan.context_lens, device=device),
            block_tables=torch.tensor(plan.block_tables, device=device),
            block_size=self._block_size,
        )

    def _sample(self, plan: StepPlan, hidden: Tensor) -> tuple[I32, Logprobs]:
        indices = plan.sampling.token_indices
        token_ids: list[I32] = [np.empty(0, np.int32)]
        parts: list[Logprobs] = []
        for rows in _slices(len(indices)):
            logits = self._logits(hidden, indices[rows])
            positions = plan.positions[indices[rows]] + np.int32(1)
            chosen, logprobs, faults = sample_valid_rows(
                logits, positions, slice_sampling(plan.sampling, rows), self._kernels
            )
            for row, fault in faults.items():
                logger.error("step %d: no token for row %d: %s", plan.step, row, fault)
            token_ids.append(chosen)
            parts.append(logprobs)
        return np.concatenate(token_ids), _join(parts)

    def _score(self, plan: StepPlan, hidden: Tensor) -> Logprobs:
        parts: list[Logprobs] = []
        for rows in _slices(len(plan.scored_token_indices)):
            logits = self._logits(hidden, plan.scored_token_indices[rows])
            finite = _finite_rows(logits)
            logits[~finite] = 0.0
            scored = score(
                logits, plan.scored_targets[rows], plan.scored_num_logprobs[rows], self._kernels
            )
            scored.logprob[~finite.cpu().numpy()] = np.nan
            parts.append(scored)
        return _join(parts)

    def _logits(self, hidden: Tensor, token_indices: I32) -> Tensor:
        index = torch.tensor(token_indices, dtype=torch.int64, device=hidden.device)
        return self._decoder.logits(hidden.index_select(0, index))


def _slices(count: int) -> Iterator[slice]:
    for start in range(0, count, HEAD_ROWS):
        yield slice(start, min(start + HEAD_ROWS, count))


def _finite_rows(logits: Tensor) -> Tensor:
    """Which rows hold neither NaN nor infinity: bool `[L]`. (A maximum or minimum keeps NaN.)"""
    return torch.isfinite(logits.amax(dim=1)) & torch.isfinite(logits.amin(dim=1))


def _join(parts: list[Logprobs]) -> Logprobs:
    """One `Logprobs` of all parts, padded to the widest."""
    width = max((part.top_token_ids.shape[1] for part in parts), default=0)
    return Logprobs(
        logprob=np.concatenate([np.empty(0, np.float32), *(part.logprob for part in parts)]),
        rank=np.concatenate([np.empty(0, np.int32), *(part.rank for part in parts)]),
        top_token_ids=np.concatenate(
            [np.empty((0, width), np.int32), *(_pad(p.top_token_ids, width, -1) for p in parts)]
        ),
        top_logprobs=np.concatenate(
            [np.empty((0, width), np.float32), *(_pad(p.top_logprobs, width, 0) for p in parts)]
        ),
    )


def _pad(array: NDArray[Any], width: int, value: int) -> NDArray[Any]:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=value)
